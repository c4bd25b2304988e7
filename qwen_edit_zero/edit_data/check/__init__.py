"""`data check`: everything about a data set is looked at before training."""
