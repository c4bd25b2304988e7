"""What GPUs can do at best."""

from __future__ import annotations

from qwen_edit_zero.planning.hardware.clusters import accelerator_of_device


def dense_bf16_tflops(name: str) -> float | None:
    """Peak of the device of this name (`torch.cuda.get_device_name()`), or None if it is not in the planner's table."""
    found = accelerator_of_device(name)
    return found and found.bf16_flops / 1e12
