"""The same small training, written the way the documentation of each tool says."""
