"""One `ParallelEngine` interface over DDP, FSDP2 and DeepSpeed ZeRO."""
