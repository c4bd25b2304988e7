"""The global gradient norm over sharded gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist


@torch.no_grad()
def global_norm(
    gradients: Sequence[torch.Tensor], *, device: torch.device, group: dist.ProcessGroup | None, reduce: bool
) -> float:
    """L2 norm over the gradients of all ranks of `group`, the same float on all of them. Collective if `reduce`.

    `gradients` are this rank's, each element held by one rank only. Norms of single tensors are computed in fp32 and
    summed in fp64, in rank order on every rank: no reduction order of a communication library can make two ranks
    differ. Not finite if any gradient is not. Gradients may lie on several devices; `device` is the collective's.
    """
    squares = torch.zeros((), dtype=torch.float64, device=device)
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            by_device.setdefault(gradient.device, []).append(gradient)
    for alike in by_device.values():
        squares += torch.stack(torch._foreach_norm(alike)).double().square().sum().to(device)
    if reduce:
        by_rank = squares.new_zeros(dist.get_world_size(group))
        by_rank[dist.get_rank(group)] = squares
        dist.all_reduce(by_rank, group=group)  # exact: every entry is a number of one rank plus zeros
        squares = by_rank.sum()
    return math.sqrt(squares.item())


def clip_coefficient(norm: float, clip_norm: float | None) -> float:
    """Factor that brings a gradient of this norm down to `clip_norm`, as `torch.nn.utils.clip_grad_norm_` has it."""
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))
