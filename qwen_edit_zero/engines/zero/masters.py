"""Where DeepSpeed keeps the fp32 masters: flat tensors, in which every parameter has a place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Place:
    """Elements `start .. start + length` of a flattened parameter lie at `offset` in the flat master `flat`."""

    flat: torch.Tensor
    offset: int
    start: int
    length: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The parameter's elements in `flat`, which is the master or a moment of its shape."""
        return flat.detach()[self.offset : self.offset + self.length]


def flat_masters(optimizer: Any, stage: int) -> list[torch.Tensor]:
    """The masters of this rank: one flat tensor for each of DeepSpeed's (sub)groups."""
    return list(optimizer.fp32_partitioned_groups_flat if stage == 3 else optimizer.single_partition_of_fp32_groups)


def places(optimizer: Any, stage: int, parameters: Iterable[Any], rank: int) -> dict[int, Place]:
    """The place of each trained parameter of which this rank holds elements, by the parameter's identity."""
    return _stage_3_places(optimizer, parameters) if stage == 3 else _stage_1_2_places(optimizer, rank)


def _stage_3_places(optimizer: Any, parameters: Iterable[Any]) -> dict[int, Place]:
    found = {}
    for parameter in parameters:
        group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = size * parameter.ds_zero_partition_rank
        length = min(size, parameter.ds_numel - start)
        if length > 0:
            found[id(parameter)] = Place(optimizer.fp32_partitioned_groups_flat[group], offset, start, length)
    return found


def _stage_1_2_places(optimizer: Any, rank: int) -> dict[int, Place]:
    """Groups of parameters are laid end to end and cut evenly over the ranks.

    DeepSpeed's own `_hp_mapping` is not used: it ignores the order that `round_robin_gradients` gives a group.
    """
    found = {}
    for group, flat in enumerate(optimizer.single_partition_of_fp32_groups):
        first = flat.numel() * rank
        parameters, offsets = optimizer.round_robin_bit16_groups[group], optimizer.round_robin_bit16_offsets[group]
        for parameter, offset in zip(parameters, offsets, strict=True):
            low, high = max(first, offset), min(first + flat.numel(), offset + parameter.numel())
            if low < high:
                found[id(parameter)] = Place(flat, low - first, low - offset, high - low)
    return found


def publish_masters(optimizer: Any, stage: int) -> None:
    """Make the parameters that the model computes with those of the masters, on all ranks. Collective."""
    if stage < 3:
        optimizer.update_lp_params()
        return
    optimizer._partition_all_parameters()
    for group in range(len(optimizer.fp16_groups)):
        optimizer._reassign_or_swap_out_partitioned_parameters(group)
    optimizer.invalidate_secondary_tensor()


def non_finite_parameters(optimizer: Any, stage: int, places: Mapping[int, Place]) -> set[int]:
    """Identities of the parameters whose reduced gradient, where this rank holds it, is not finite.

    To be asked between the reduction and the clearing of a step's gradients.
    """
    if any(place.flat.grad is not None for place in places.values()):  # offloaded: gradients lie beside the masters
        return {
            key
            for key, place in places.items()
            if place.flat.grad is not None and not place.of(place.flat.grad).isfinite().all()
        }
    groups = optimizer.fp16_groups if stage == 3 else optimizer.params_in_partition
    return {
        id(parameter)
        for number, group in enumerate(groups)
        for parameter, gradient in zip(group, optimizer.averaged_gradients.get(number) or (), strict=False)
        if gradient is not None and not gradient.isfinite().all()
    }
