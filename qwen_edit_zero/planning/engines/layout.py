"""How many elements of parameters a rank holds under each way of sharding; the rank that holds most."""

from __future__ import annotations

from collections.abc import Iterable

from qwen_edit_zero.planning.jobs.deepspeed import ZeroOptions
from qwen_edit_zero.planning.jobs.job import Job
from qwen_edit_zero.planning.jobs.model import Parameter

ZERO_ALIGNMENT = 2  # elements to which DeepSpeed aligns the start of each rank's part of a flat group


def rows_part(parameter: Parameter, shards: int) -> int:
    """FSDP2: elements of the first of `shards` pieces along dimension 0, as torch.chunk cuts them."""
    rows = parameter.shape[0]
    return -(-rows // shards) * (parameter.elements // rows)


def slice_part(parameter: Parameter, shards: int) -> int:
    """ZeRO-3: elements of each of `shards` equal, padded slices of the flattened parameter."""
    return -(-parameter.elements // shards)


def flat_elements(parameters: Iterable[Parameter], world: int) -> int:
    """ZeRO-1/2: elements of the parameters laid end to end, padded so that ranks have equal, aligned parts."""
    alignment = ZERO_ALIGNMENT * world
    return -(-sum(p.elements for p in parameters) // alignment) * alignment


def persistent(parameters: Iterable[Parameter], zero: ZeroOptions) -> tuple[Parameter, ...]:
    """ZeRO-3: those of the parameters that are always gathered, biases and norms."""
    kept, elements = [], 0
    for parameter in parameters:
        small = parameter.elements <= zero.persistence_threshold
        if small and elements + parameter.elements <= zero.model_persistence_threshold:
            kept.append(parameter)
            elements += parameter.elements
    return tuple(kept)


def sub_groups(job: Job) -> tuple[int, ...]:
    """ZeRO-3: elements a rank of each group of masters that is stepped at once."""
    assert job.zero is not None
    parts = [slice_part(p, job.world) for p in job.trained]
    limit = job.zero.sub_group
    if limit >= sum(parts):
        return (sum(parts),)
    groups, current = [], 0
    for part in parts:
        current += part
        if current >= limit:
            groups.append(current)
            current = 0
    return (*groups, current) if current else tuple(groups)


def elements(parameters: Iterable[Parameter]) -> int:
    """All of them together."""
    return sum(p.elements for p in parameters)
