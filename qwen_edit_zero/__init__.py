"""Train Qwen-Image-Edit-2509 and its variants under DeepSpeed ZeRO, FSDP2 or DDP behind one engine interface."""

__version__ = "0.1.0"
