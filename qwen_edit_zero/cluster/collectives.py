"""Small collectives on plain numbers; the same call whether there is one rank or many."""

from __future__ import annotations

import torch
import torch.distributed as dist


def _many() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def sum_over_ranks(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Sum of a small CPU tensor over all ranks, on CPU; `device` is where the process group's tensors live."""
    if not _many():
        return values
    moved = values.to(device)
    dist.all_reduce(moved)
    return moved.cpu()


def any_rank(flag: bool, device: torch.device) -> bool:
    """True on every rank if `flag` is true on at least one."""
    return bool(sum_over_ranks(torch.tensor([int(flag)]), device).item())


def barrier() -> None:
    """Wait for all ranks."""
    if _many():
        dist.barrier()
