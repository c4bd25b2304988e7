"""What GPUs can do at best."""

from __future__ import annotations

# Dense bf16 with fp32 accumulation, TFLOP/s, from NVIDIA's data sheet of each product (half of the figures "with
# sparsity"); the RTX 3090's and 4090's from the white papers of Ampere GA102 and Ada; the H20's from resellers.
# The first name that a device's own contains decides, so narrower names come first.
DENSE_BF16_TFLOPS: tuple[tuple[str, float], ...] = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("B100", 1750.0),
    ("GH200", 989.4),
    ("H200", 989.4),
    ("H100 PCIe", 756.0),
    ("H100 NVL", 835.5),
    ("H100", 989.4),
    ("H800", 989.4),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A800", 312.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("A30", 165.0),
    ("A40", 149.7),
    ("L40S", 362.0),
    ("L4", 121.0),
    ("RTX 6000 Ada", 364.2),
    ("RTX 4090", 165.2),
    ("RTX 3090", 71.0),
)


def dense_bf16_tflops(name: str) -> float | None:
    """Peak of the device of this name (`torch.cuda.get_device_name()`), or None if it is not in the table."""
    return next((peak for part, peak in DENSE_BF16_TFLOPS if part in name), None)
