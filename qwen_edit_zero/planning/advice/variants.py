"""The ways to run a recipe that `plan --recommend` looks at, as overrides that training takes as they are."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

# Options of one engine that others would call a mistake; each family says those it wants.
RESET = {
    "engine.shard_size": "null",
    "engine.reshard_after_forward": "true",
    "engine.prefetch_blocks": "null",
    "engine.cpu_offload": "false",
    "engine.pin_memory": "true",
    "engine.reduce_every_micro_batch": "true",
    "engine.deepspeed": "null",
}
CHECKPOINTING = "model.activation_checkpointing"
MICRO, GLOBAL, SEQUENCE = "batch.micro_size", "batch.global_size", "engine.sequence_parallel"
_MOST_MICRO = 8
_MAY_SPLIT = (1, 2, 4, 8)


@dataclass(frozen=True)
class Family:
    """An engine with its options.

    Attributes:
        name: for people.
        ds: the DeepSpeed JSON, under DeepSpeed.
        options: overrides of this family.
        tier: 0: looked at always; 1: of no use where one of 0 fits; 2: slower, or another optimizer: looked at where
            none of the others fits.
        why: what is gained by it.
    """

    name: str
    backend: str
    why: str
    ds: Path | None = None
    options: tuple[str, ...] = ()
    tier: int = 0

    @property
    def overrides(self) -> tuple[str, ...]:
        """Everything that makes a recipe one of this family."""
        said = {option.partition("=")[0] for option in self.options}
        return (*(f"{key}={value}" for key, value in RESET.items() if key not in said), *self.options)


@dataclass(frozen=True)
class Recompute:
    """What of the blocks is computed again in the backward pass; least work first in `RECOMPUTE`."""

    name: str
    overrides: tuple[str, ...]


def _recompute(name: str, mode: str, every: int = 1, offload: bool = False) -> Recompute:
    return Recompute(
        name,
        (
            f"{CHECKPOINTING}={mode}",
            f"model.checkpoint_every={every}",
            f"model.offload_activations={'true' if offload else 'false'}",
        ),
    )


NOTHING = _recompute("no block is recomputed", "none")
SELECTIVE = _recompute("blocks are recomputed, attention is not", "selective")
EVERY_BLOCK = _recompute("each block is recomputed", "block")
OFFLOADED = _recompute("each block is recomputed, from inputs in host memory", "block", offload=True)
RECOMPUTE = (
    NOTHING,
    _recompute("every fourth block is recomputed", "block", 4),
    _recompute("every other block is recomputed", "block", 2),
    SELECTIVE,
    EVERY_BLOCK,
    OFFLOADED,
)


def families(*, world: int, gpus_per_node: int, engine: str | None, ds: Path | None) -> Iterator[Family]:
    """The engines to look at; only `engine`, or DeepSpeed with `ds`, where these are given."""
    if ds is not None:
        yield Family(f"DeepSpeed with {ds}", "deepspeed", "its configuration was given", ds)
        return
    yield from (family for family in _all(world, gpus_per_node) if engine in (None, family.backend))


def _all(world: int, gpus_per_node: int) -> Iterator[Family]:
    eight = "optimizer.kind=adamw_8bit"
    yield Family("DDP", "ddp", "gathers nothing, one reduction a step" if world > 1 else "the simplest on one GPU")
    alone = int(world == 1)  # shards nothing, but casts weights a block at a time, or keeps gradients in bf16
    why = "casts a block's weights at a time" if alone else "shards everything, gathers a block at a time"
    yield Family("FSDP2", "fsdp2", why, tier=alone)
    for stage in (1, 2, 3):
        why = "its weights and gradients are in bf16" if alone else _ZERO[stage]
        yield Family(f"ZeRO-{stage}", "deepspeed", why, Path(f"ds_configs/zero{stage}.json"), tier=alone)
    if world > 1:
        kept = "engine.reshard_after_forward=false"
        yield Family("FSDP2, gathered once", "fsdp2", "keeps gathered blocks from forward to backward", None, (kept,))
    for size in _groups(world, gpus_per_node):
        why = f"gathers among {size} ranks, so that only gradients go further"
        yield Family(f"FSDP2 hybrid, groups of {size}", "fsdp2", why, None, (f"engine.shard_size={size}",))
    yield Family("FSDP2 with 8-bit moments", "fsdp2", "6 bytes a parameter less", None, (eight,), tier=2)
    yield Family("DDP with 8-bit moments", "ddp", "6 bytes a parameter less", None, (eight,), tier=2)
    yield Family("FSDP2 with offloading", "fsdp2", "state in host memory", None, ("engine.cpu_offload=true",), tier=2)
    for stage in (2, 3):
        name, json = f"ZeRO-{stage} with offloading", Path(f"ds_configs/zero{stage}_offload.json")
        yield Family(name, "deepspeed", "state in host memory", json, tier=2)


_ZERO = {
    1: "shards masters and moments",
    2: "shards masters, moments and gradients, and gathers nothing while computing",
    3: "shards everything, gathers layer by layer",
}


def _groups(world: int, gpus_per_node: int) -> list[int]:
    """Sizes of shard groups worth trying: a node, and doublings of it."""
    sizes: list[int] = []
    size = gpus_per_node
    while size < world and len(sizes) < 4:
        if world % size == 0 and size > 1:
            sizes.append(size)
        size *= 2
    return sizes


def recomputations(pinned: Collection[str]) -> Sequence[Recompute | None]:
    """What may be recomputed, least first; (None,): as the recipe says, where the user has said it."""
    said = {CHECKPOINTING, "model.checkpoint_every", "model.offload_activations"}
    return (None,) if said.intersection(pinned) else RECOMPUTE


def splits(*, heads: int, world: int, gpus_per_node: int, pinned: Collection[str]) -> Sequence[int | None]:
    """Ranks that may share a sample."""
    if SEQUENCE in pinned:
        return (None,)
    on_node = min(world, gpus_per_node)
    return [size for size in _MAY_SPLIT if heads % size == 0 and on_node % size == 0 and world % size == 0]


def micro_sizes(*, global_size: int, shares: int, pinned: Collection[str]) -> Sequence[int | None]:
    """Samples of a forward, smallest first; empty if the batch does not divide over `shares`."""
    if MICRO in pinned:
        return (None,)
    each, rest = divmod(global_size, shares)
    return [] if rest else [size for size in range(1, _MOST_MICRO + 1) if each % size == 0]
