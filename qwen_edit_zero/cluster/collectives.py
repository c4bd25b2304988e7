"""Small collectives on plain numbers; the same call whether there is one rank or many."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
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


def any_over_ranks(mask: npt.NDArray[np.bool_], device: torch.device) -> npt.NDArray[np.bool_]:
    """For each element whether it is set on some rank; one byte an element travels. `device` as above."""
    if not _many():
        return mask
    moved = torch.from_numpy(mask.view(np.uint8)).to(device, copy=True)
    dist.all_reduce(moved, op=dist.ReduceOp.MAX)
    return moved.cpu().numpy().view(np.bool_)


def gather_numbers(mine: torch.Tensor, device: torch.device) -> torch.Tensor:
    """(ranks, n) of every rank's small (n,) CPU tensor, on CPU, on every rank; `device` as above."""
    if not _many():
        return mine.view(1, -1)
    moved = mine.to(device)
    everyone = [torch.empty_like(moved) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, moved)
    return torch.stack(everyone).cpu()


def gather_objects(mine: Any) -> list[Any]:
    """What every rank gave, in the order of ranks, on every rank; small objects only."""
    if not _many():
        return [mine]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


def from_rank_0(value: Any) -> Any:
    """Rank 0's small object, on every rank; what the others give does not matter."""
    if not _many():
        return value
    told = [value]
    dist.broadcast_object_list(told, src=0)
    return told[0]


def barrier() -> None:
    """Wait for all ranks."""
    if _many():
        dist.barrier()
