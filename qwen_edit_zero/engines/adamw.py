"""AdamW in fp32 or 8 bits. Its state is made beforehand, so that it can be saved and loaded before the first step."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Iterable
from typing import Any

import torch

from qwen_edit_zero.engines.quantized import SMALLEST, QuantizedMoment
from qwen_edit_zero.engines.shards import MOMENTS
from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.models import OptimizerSettings


def check_optimizer(settings: OptimizerSettings) -> None:
    """Raise SettingsError if the optimizer needs a package that is not installed."""
    if settings.kind == "adamw_8bit" and importlib.util.find_spec("bitsandbytes") is None:
        raise SettingsError(
            "optimizer.kind is adamw_8bit, which needs the package bitsandbytes, and it is not installed. Install it "
            "with: pip install -c constraints.txt bitsandbytes (or the extra eightbit of this package), or use "
            "optimizer.kind=adamw."
        )


def make_optimizer(parameters: list[Any], settings: OptimizerSettings, device: torch.device) -> torch.optim.Optimizer:
    """The optimizer that the settings name, over this rank's parts of the parameters.

    Raises SettingsError if it needs a package that is not installed.
    """
    if settings.kind == "adamw":
        return make_adamw(parameters, settings, device)
    check_optimizer(settings)
    # About a kernel for 4-bit layers on CPUs, said on every rank.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    from bitsandbytes.optim import AdamW8bit

    adamw: torch.optim.Optimizer = AdamW8bit(
        parameters or [torch.nn.Parameter(torch.empty(0, device=device))],
        lr=settings.lr,
        betas=settings.betas,
        eps=settings.eps,
        weight_decay=settings.weight_decay,
        min_8bit_size=SMALLEST,
    )
    return adamw


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
    """Give every parameter the state the optimizer would make in its first step: zero moments, zero steps."""
    counter: Any
    for index, parameter in enumerate(parameters):
        if _is_8bit(optimizer):
            optimizer.init_state(optimizer.param_groups[0], parameter, 0, index)  # type: ignore[attr-defined]
            continue
        if isinstance(optimizer, torch.optim.AdamW):
            counter = torch.zeros((), device=parameter.device if optimizer.defaults["fused"] else "cpu")
        else:
            counter = 0
        optimizer.state[parameter] = {"step": counter} | {
            kind: torch.zeros_like(parameter, requires_grad=False) for kind in MOMENTS
        }


def flat_moments(
    optimizer: torch.optim.Optimizer, parameter: torch.Tensor
) -> dict[str, torch.Tensor | QuantizedMoment]:
    """The moments of a parameter that has its state, 1-D, aliasing the state."""
    state = optimizer.state[parameter]
    if not _is_8bit(optimizer):
        return {kind: state[kind].view(-1) for kind in MOMENTS}
    moments: dict[str, torch.Tensor | QuantizedMoment] = {}
    for number, kind in enumerate(MOMENTS, start=1):
        tensor = state[f"state{number}"]
        is_quantized = tensor.dtype is torch.uint8
        moments[kind] = (
            QuantizedMoment(tensor, state[f"absmax{number}"], state[f"qmap{number}"])
            if is_quantized
            else tensor.view(-1)
        )
    return moments


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


def set_step(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, steps: int) -> None:
    """Set the step counter of a parameter that has its state; the bias correction depends on it."""
    state = optimizer.state[parameter]
    if isinstance(state["step"], torch.Tensor):
        state["step"].fill_(steps)
    else:
        state["step"] = steps


def _is_8bit(optimizer: torch.optim.Optimizer) -> bool:
    return type(optimizer).__module__.startswith("bitsandbytes.")
