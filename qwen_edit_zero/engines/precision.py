"""The dtype of computation for each `precision.mode`. Weights, moments and gradient sums are fp32 in all of them."""

from __future__ import annotations

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
