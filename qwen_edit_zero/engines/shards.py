"""Shards: what this rank holds of the parameters and their moments, and what any engine does with them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from qwen_edit_zero.engines.parameters import frozen
from qwen_edit_zero.engines.quantized import QuantizedMoment
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.flat_state import EMA, FROZEN, PARAM, FlatRange, TensorSource

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Shard:
    """Elements `start .. start + values.numel()` of a flattened parameter, as views into the engine's own storage.

    Attributes:
        name: clean parameter name.
        shape: shape of the whole parameter.
        start: flat index of the first element held.
        values: 1-D view; fp32 master values of trained parameters, the compute precision for frozen ones.
        moments: 1-D views by name, as long as `values`, in fp32 or 8 bits; empty for frozen parameters.
        average: 1-D view of the running average of the values, fp32; None if there is none.
        replicated: every rank holds the same shard (else it is one of several that make up the parameter).
    """

    name: str
    shape: tuple[int, ...]
    start: int
    values: torch.Tensor
    moments: Mapping[str, torch.Tensor | QuantizedMoment] = field(default_factory=dict)
    average: torch.Tensor | None = None
    replicated: bool = False

    def tensors(self) -> dict[str, torch.Tensor | QuantizedMoment]:
        """`values` and moments by kind."""
        return {PARAM: self.values, **self.moments}

    def saved_tensors(self) -> dict[str, torch.Tensor | QuantizedMoment]:
        """The same and the average: all that a checkpoint has of it."""
        return self.tensors() | ({} if self.average is None else {EMA: self.average})


def written_ranges(shards: Sequence[Shard], *, replica: int, replicas: int) -> Iterator[FlatRange]:
    """The part of `shards` that replica number `replica` of `replicas` equal ones is to write.

    The shards are laid end to end and cut into `replicas` equal stretches, so that every replica writes the same
    amount in few, long ranges.
    """
    total = sum(shard.values.numel() for shard in shards)
    first, end = total * replica // replicas, total * (replica + 1) // replicas
    offset = 0
    for shard in shards:
        length = shard.values.numel()
        low, high = max(first - offset, 0), min(end - offset, length)
        offset += length
        if low < high:
            for kind, tensor in shard.saved_tensors().items():
                yield FlatRange(shard.name, kind, shard.shape, shard.start + low, tensor[low:high].detach())


@torch.no_grad()
def read_values(shards: Iterable[Shard], source: TensorSource) -> None:
    """Fill the shards' values (no moments) from `source`, reading just their ranges."""
    for shard in shards:
        if shard.values.numel():
            shard.values.copy_(source.read(shard.name, shard.start, shard.values.numel()))


@torch.no_grad()
def read_frozen(module: torch.nn.Module, shards: Iterable[Shard], source: TensorSource) -> None:
    """Fill the frozen parameters. Raises CheckpointError unless `source` has just these, in their shapes."""
    shapes = {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in frozen(module).items()}
    check_kind(FROZEN, shapes, source)
    for shard in shards:
        if shard.values.numel():
            shard.values.copy_(source.read(shard.name, shard.start, shard.values.numel(), FROZEN))


@torch.no_grad()
def read_state(shards: Iterable[Shard], source: TensorSource) -> None:
    """Fill values and moments from `source`, reading just their ranges."""
    for shard in shards:
        for kind, tensor in shard.tensors().items():
            if tensor.numel():
                tensor.copy_(source.read(shard.name, shard.start, tensor.numel(), kind))


def check_state(shapes: Mapping[str, tuple[int, ...]], source: TensorSource) -> None:
    """Raise CheckpointError unless `source` holds exactly the trained parameters `shapes`, with their moments."""
    for kind in (PARAM, *MOMENTS):
        check_kind(kind, shapes, source)


def check_kind(kind: str, shapes: Mapping[str, tuple[int, ...]], source: TensorSource) -> None:
    """The same for one kind."""
    held = set(source.names(kind))
    for name, shape in shapes.items():
        if name not in held:
            raise CheckpointError(
                f"The checkpoint has no {kind} of '{name}', which this run trains. It was written by a run that "
                f"froze it or by another model; use the same model and model.freeze as that run."
            )
        if tuple(source.shape(name, kind)) != shape:
            raise CheckpointError(
                f"{kind} of '{name}' has shape {tuple(source.shape(name, kind))} in the checkpoint but "
                f"{shape} in this run's model; it belongs to another model."
            )
    if surplus := sorted(held - set(shapes)):
        raise CheckpointError(
            f"The checkpoint holds {kind} of '{surplus[0]}' ({len(surplus)} such), which this run does not "
            f"train: what was learned there would be lost. Use the same model and model.freeze as the run that "
            f"wrote it."
        )


@torch.no_grad()
def gather_whole(
    shape: tuple[int, ...], shard: Shard | None, *, device: torch.device, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """The whole parameter in fp32 on CPU, from the shards of all ranks of `group`. Collective, exact to the bit.

    Ranks contribute their elements as integers and zeros elsewhere, so that a sum joins any uneven partition.
    """
    whole = torch.zeros(math.prod(shape), dtype=torch.float32, device=device)
    if shard is not None and shard.values.numel():
        whole[shard.start : shard.start + shard.values.numel()].copy_(shard.values)
    if shard is None or not shard.replicated:
        dist.all_reduce(whole.view(torch.int32), group=group)
    return whole.view(shape).cpu()
