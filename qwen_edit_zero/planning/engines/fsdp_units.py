"""FSDP2's units: each block is gathered and reduced as a whole, and so is what lies outside of blocks (the root)."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

from qwen_edit_zero.planning.engines.layout import rows_part
from qwen_edit_zero.planning.engines.modules import first_backward_block
from qwen_edit_zero.planning.jobs.job import Job
from qwen_edit_zero.planning.jobs.model import Parameter, TransformerShape
from qwen_edit_zero.planning.jobs.trainable import split, without_gradient
from qwen_edit_zero.settings.models import ModelSettings


@dataclass(frozen=True)
class Unit:
    """Elements of a block, or of the root.

    Attributes:
        whole: all parameters.
        gathered: the same, padded to equal pieces of rows.
        part: this rank's piece.
        reduced: padded, those whose gradients are reduced.
        gradients: the same without padding.
        in_backward: whether a gradient goes through, so that it is gathered again.
    """

    whole: int
    gathered: int
    part: int
    reduced: int
    gradients: int
    in_backward: bool


def units(job: Job) -> tuple[Unit, tuple[Unit, ...]]:
    """(root, blocks) of a job under FSDP2."""
    return _units(job.model, job.settings.model, job.shard_size)


@functools.lru_cache(maxsize=256)
def _units(model: TransformerShape, settings: ModelSettings, shards: int) -> tuple[Unit, tuple[Unit, ...]]:
    trained, frozen = split(model, settings)
    first = first_backward_block(trained, model.blocks)
    reduced = {p.name for p in trained} - {p.name for p in without_gradient(trained, model.blocks)}
    members: dict[int | None, list[Parameter]] = {}
    for parameter in trained + frozen:
        members.setdefault(parameter.block, []).append(parameter)
    root = _unit(members.get(None, ()), reduced, shards, True)
    return root, tuple(_unit(members[n], reduced, shards, n >= first) for n in range(model.blocks))


def _unit(members: Iterable[Parameter], reduced: set[str], shards: int, in_backward: bool) -> Unit:
    everything = list(members)
    with_gradient = [p for p in everything if p.name in reduced]
    part = sum(rows_part(p, shards) for p in everything)
    return Unit(
        whole=sum(p.elements for p in everything),
        gathered=part * shards,
        part=part,
        reduced=sum(rows_part(p, shards) for p in with_gradient) * shards,
        gradients=sum(p.elements for p in with_gradient),
        in_backward=in_backward,
    )
