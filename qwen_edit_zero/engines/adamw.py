"""AdamW with its state made beforehand, so that it can be saved and loaded before the first step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from qwen_edit_zero.engines.shards import MOMENTS
from qwen_edit_zero.settings.models import OptimizerSettings


def make_adamw(parameters: list[Any], settings: OptimizerSettings, device: torch.device) -> torch.optim.AdamW:
    """AdamW over `parameters`: fused where this device type has a fused kernel, else foreach."""
    fused = device.type in ("cuda", "cpu")
    return torch.optim.AdamW(
        parameters or [torch.nn.Parameter(torch.empty(0, device=device))],  # a rank may hold no element at all
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        fused=fused,
        foreach=not fused,
    )


def prime_state(optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor]) -> None:
    """Give every parameter the state AdamW would make in its first step: zero moments, zero steps."""
    counter: Any
    for parameter in parameters:
        if isinstance(optimizer, torch.optim.AdamW):
            counter = torch.zeros((), device=parameter.device if optimizer.defaults["fused"] else "cpu")
        else:
            counter = 0
        optimizer.state[parameter] = {"step": counter} | {
            kind: torch.zeros_like(parameter, requires_grad=False) for kind in MOMENTS
        }


def set_step(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Set the step counters, on which the bias correction depends."""
    for state in optimizer.state.values():
        if isinstance(state["step"], torch.Tensor):
            state["step"].fill_(steps)
        else:
            state["step"] = steps
