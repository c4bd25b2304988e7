"""What a run sets for a whole device: how GPUs round and choose kernels, and how their memory is cut. Nowhere else.

| what | choice | why |
|---|---|---|
| products and convolutions in fp32 | TF32 (`precision.tf32`) | fp32 is left where little is computed |
| cuDNN's trial of kernels | off (`gpu.cudnn_benchmark`) | it chooses by time, so the bits of latents would change |
| layout of the VAE | as stored (`gpu.channels_last`) | tensor cores want channels last; the gain depends on the GPU |
| allocator | segments that grow (`gpu.expandable_segments`) | samples differ in size; fixed segments would fragment |

Everything else is as torch has it.
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping
from typing import TYPE_CHECKING

from qwen_edit_zero.settings.models import Settings

if TYPE_CHECKING:
    import torch

# Names under which torch reads the allocator's options; the first is its own, the others are older.
ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def choose_allocator(settings: Settings, environment: MutableMapping[str, str] = os.environ) -> None:
    """Tell torch's allocator how to cut GPU memory, unless the user has. To be called before torch is imported.

    Without growing segments, memory freed by a sample of one size is often useless for the next one of another size,
    and a run that fits by the sum of its tensors ends for lack of memory.
    """
    if settings.gpu.expandable_segments and not any(name in environment for name in ALLOCATOR_VARIABLES):
        environment[ALLOCATOR_VARIABLES[0]] = "expandable_segments:True"


def set_numerics(settings: Settings, device: torch.device) -> None:
    """Say how fp32 is rounded and how convolution kernels are chosen; once in a process. CPUs are left alone.

    By torch's older switches throughout: once both kinds have been used, torch refuses to tell what is set.
    """
    if device.type != "cuda":
        return
    import torch

    torch.set_float32_matmul_precision("high" if settings.precision.tf32 else "highest")
    torch.backends.cudnn.allow_tf32 = settings.precision.tf32
    torch.backends.cudnn.benchmark = settings.gpu.cudnn_benchmark
