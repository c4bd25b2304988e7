"""Benchmarks of the order of samples and of reading batches."""
