"""DeepSpeed ZeRO stages 1, 2 and 3 behind the engine interface. Nothing outside this package imports deepspeed."""
