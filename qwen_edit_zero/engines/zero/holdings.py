"""What DeepSpeed holds of a model, by kind, for reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from qwen_edit_zero.engines.shards import MOMENTS
from qwen_edit_zero.engines.zero.masters import flat_masters

Held = Iterator[tuple[str, torch.Tensor]]


def held(optimizer: Any, stage: int, adamw: torch.optim.Optimizer, parameters: Iterable[Any]) -> Held:
    """(kind, tensor) of parameters, gathered ones, masters, moments and, where there are any, gradients."""
    everything = list(parameters)
    for parameter in everything:
        yield "parameters", parameter.ds_tensor if stage == 3 else parameter.detach()
        if stage == 3 and parameter.numel() == parameter.ds_numel:  # small ones stay gathered
            yield "gathered", parameter.detach()
    for flat in flat_masters(optimizer, stage):
        yield "masters", flat.detach()
        for kind in MOMENTS:
            yield "moments", adamw.state[flat][kind]
        if flat.grad is not None:
            yield "gradients", flat.grad
    if stage == 3:
        if optimizer.grad_partitions_flat_buffer is not None:
            yield "gradients", optimizer.grad_partitions_flat_buffer
        return
    for gradients in optimizer.averaged_gradients.values():
        for gradient in gradients or ():
            if gradient is not None:
                yield "gradients", gradient
    for parameter in everything:
        for gradient in (parameter.grad, getattr(parameter, "grad_accum", None)):
            if gradient is not None:
                yield "gradients", gradient
