"""The model run without numbers: what its operations compute, keep and allocate."""
