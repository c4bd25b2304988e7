"""The training loop and what hangs on it: metrics, progress, checkpoints, sample pictures."""
