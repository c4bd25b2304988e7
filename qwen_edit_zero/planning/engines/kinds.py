"""What memory is for, and the phases of a run that have peaks of their own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """What memory is for. Trained parameters of DDP and FSDP2 are fp32, so they are the masters."""

    PARAMETERS = "parameters"
    MASTERS = "fp32 masters"
    GRADIENTS = "gradients"
    MOMENTS = "moments"
    EMA = "weight average"
    GATHERED = "gathered parameters"
    BUCKETS = "buckets"
    ACTIVATIONS = "activations"
    INPUTS = "inputs"
    WEIGHTS_OF_OTHERS = "text encoder and VAE"
    CONTEXT = "CUDA context and libraries"
    COMMUNICATORS = "NCCL's buffers"
    FRAGMENTATION = "fragmentation"
    SAVE = "copy for a checkpoint"


class Phase(StrEnum):
    """Parts of a run that have peaks of their own."""

    ENCODE = "filling the cache"
    LOAD = "loading"
    FORWARD = "forward"
    BACKWARD = "backward"
    STEP = "optimizer step"
    SAVE = "saving"
    SAMPLE = "sample pictures"


Bytes = Mapping[Kind, int]


@dataclass(frozen=True)
class Holding:
    """Bytes of a rank by kind, on its device and in host memory; kinds without any are left out."""

    device: Bytes = field(default_factory=dict)
    host: Bytes = field(default_factory=dict)


def total(held: Bytes) -> int:
    """All kinds together."""
    return sum(held.values())


def added(parts: Iterable[Bytes]) -> dict[Kind, int]:
    """The sum, kind by kind; what is 0 is left out."""
    sums: dict[Kind, int] = {}
    for part in parts:
        for kind, size in part.items():
            sums[kind] = sums.get(kind, 0) + size
    return {kind: sums[kind] for kind in Kind if sums.get(kind)}


def page_locked(size: int) -> int:
    """Host bytes that torch takes for a page-locked tensor of `size` bytes: the next power of two."""
    return 1 << (size - 1).bit_length() if size > 0 else 0
