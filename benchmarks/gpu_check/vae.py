"""The VAE's time to encode a picture, by the layout of its tensors and by how cuDNN chooses kernels."""

from __future__ import annotations

import time
from dataclasses import dataclass
from statistics import median

import torch
from diffusers import AutoencoderKLQwenImage

from benchmarks.gpu_check.memory import release, synchronize
from qwen_edit_zero.edit_model.components import load_vae, put_channels_last
from qwen_edit_zero.edit_model.folder import open_model_folder


@dataclass(frozen=True)
class Encoding:
    """Median seconds of one picture."""

    channels_last: bool
    cudnn_benchmark: bool
    seconds: float


def measure(device: torch.device, *, pixels: int, released_size: bool, repeats: int = 5) -> list[Encoding]:
    """Encode a `pixels` x `pixels` picture in every way, in bf16 (fp32 on CPUs, which have but one way)."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    # Without arguments the class has the size of the released one.
    vae = AutoencoderKLQwenImage() if released_size else load_vae(open_model_folder("tiny"))
    torch.nn.Module.to(vae, device, dtype)  # diffusers' own warns of parts to be kept in fp32: none
    vae.eval().requires_grad_(False)
    picture = torch.rand(1, 3, 1, pixels, pixels, device=device, dtype=dtype) * 2 - 1
    before = torch.backends.cudnn.benchmark
    found = []
    try:
        for channels_last in (False, True):
            if channels_last:
                put_channels_last(vae)
            for benchmark in (False, True) if device.type == "cuda" else (False,):
                torch.backends.cudnn.benchmark = benchmark
                found.append(Encoding(channels_last, benchmark, _seconds(vae, picture, device, repeats)))
    finally:
        torch.backends.cudnn.benchmark = before
    del vae
    release(device)
    return found


@torch.no_grad()
def _seconds(vae: AutoencoderKLQwenImage, picture: torch.Tensor, device: torch.device, repeats: int) -> float:
    vae.encode(picture)
    times = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        vae.encode(picture)
        synchronize(device)
        times.append(time.perf_counter() - began)
    return median(times)
