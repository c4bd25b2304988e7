"""Checkpoints that other programs wrote: DeepSpeed's own folders and torch distributed checkpoints (DCP)."""
