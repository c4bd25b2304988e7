"""Choosing the attention backend, by trying it."""

from __future__ import annotations

import difflib

import torch
from diffusers.models.attention_dispatch import (
    AttentionBackendName,
    _check_attention_backend_requirements,
    dispatch_attention_fn,
)

from qwen_edit_zero.errors import SettingsError

AUTO = "auto"
_BEST = "native"  # PyTorch's SDPA picks flash, cuDNN, efficient or math kernels by device, type and mask
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def resolve_attention(name: str, *, device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool) -> str:
    """The diffusers attention backend to use for `model.attention`, after a trial forward and backward with it.

    Args:
        name: a diffusers backend name, or "auto".
        device, dtype, head_dim: where and on what it will compute.
        masked: whether padded batches will occur, which need a backend that takes a mask.

    Raises SettingsError if the backend is unknown, would download code, cannot run here, gives no gradient, or gives
    results unlike those of PyTorch's own.
    """
    if name == AUTO:
        return _BEST
    known = [backend.value for backend in AttentionBackendName]
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        raise SettingsError(
            f"model.attention: there is no backend {name!r}; {f'did you mean {near[0]!r}? ' if near else ''}"
            f"Known: auto, {', '.join(n for n in known if not n.endswith('_hub'))}"
        )
    if name.endswith("_hub"):
        raise SettingsError(
            f"model.attention: {name!r} downloads its kernels while running, which is not done here; install the "
            f"package and use {name.removesuffix('_hub').lstrip('_')!r}, or use auto"
        )
    try:
        problem = _trial(name, device, dtype, head_dim, masked)
    except Exception as error:  # whatever a third-party kernel raises: the user must learn that it cannot be used
        problem = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else error!r}"
    if problem:
        where = f"{device.type} in {str(dtype).removeprefix('torch.')}{' with padded batches' if masked else ''}"
        raise SettingsError(f"model.attention: {name!r} cannot train on {where} here ({problem}); use auto")
    return name


def _trial(name: str, device: torch.device, dtype: torch.dtype, head_dim: int, masked: bool) -> str | None:
    _check_attention_backend_requirements(AttentionBackendName(name))
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 64, 2, head_dim, generator=generator).to(device, dtype).requires_grad_() for _ in range(3)
    )
    mask = torch.ones(2, 1, 1, 64, dtype=torch.bool, device=device) if masked else None
    if mask is not None:
        mask[1, ..., :9] = False
    outputs, gradients = [], []
    for backend in (_BEST, name):
        out = dispatch_attention_fn(query, key, value, attn_mask=mask, backend=AttentionBackendName(backend))
        if not out.requires_grad:
            return "it has no backward pass"
        outputs.append(out.detach().float())
        gradients.append(torch.autograd.grad(out.float().square().sum(), query)[0].float())
    for found, expected in ((outputs[1], outputs[0]), (gradients[1], gradients[0])):
        error = ((found - expected).norm() / expected.norm()).item()
        if not error <= _TOLERANCE.get(dtype, 5e-2):
            return f"its results are {error:.0%} off those of PyTorch"
    return None
