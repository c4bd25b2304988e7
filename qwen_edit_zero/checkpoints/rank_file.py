"""What one rank writes: a safetensors file of its flat ranges, streamed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from qwen_edit_zero.checkpoints.disk import CHUNK_BYTES, ChecksummedFile
from qwen_edit_zero.checkpoints.manifest import FileRecord
from qwen_edit_zero.flat_state import FlatRange
from qwen_edit_zero.safetensors_file import ITEM_SIZE, build_header

DTYPE_NAMES = {
    torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip

RangeMaker = Callable[[], Iterable[FlatRange]]


@dataclass(frozen=True)
class PlannedRange:
    """A range that will be written, `offset` bytes from the start of the file."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    start: int
    length: int
    offset: int

    @property
    def entry(self) -> str:
        """Its name in the safetensors file."""
        return f"{self.kind}:{self.name}[{self.start}:{self.start + self.length}]"


@dataclass(frozen=True)
class RankPlan:
    """A rank's file before its data: header bytes, ranges in order, size of the whole file in bytes."""

    header: bytes
    ranges: tuple[PlannedRange, ...]
    size: int

    def before(self, kind: str) -> RankPlan:
        """The same without the ranges of this kind, which come last, if there are any."""
        for number, planned in enumerate(self.ranges):
            if planned.kind == kind:
                return RankPlan(self.header, self.ranges[:number], planned.offset)
        return self


def save_metadata(save_id: str, rank: int, world_size: int, step: int) -> dict[str, str]:
    """What every file of a save carries first, so that files of two saves are never mixed unnoticed."""
    return {"save_id": save_id, "rank": str(rank), "world_size": str(world_size), "step": str(step)}


def plan_rank_file(make_ranges: RangeMaker, metadata: dict[str, str]) -> RankPlan:
    """Lay out the file of this rank; looks at names, shapes and dtypes only."""
    found: list[tuple[FlatRange, str]] = []
    for item in make_ranges():
        assert item.values.dim() == 1, f"{item.name} ({item.kind}): a flat range must be 1-D"
        assert item.values.dtype in DTYPE_NAMES, f"{item.name} ({item.kind}): dtype {item.values.dtype}"
        found.append((item, DTYPE_NAMES[item.values.dtype]))
    planned = [
        PlannedRange(r.name, r.kind, tuple(r.shape), dtype, r.start, r.values.numel(), offset=0) for r, dtype in found
    ]
    entries = [(p.entry, p.dtype, (p.length,)) for p in planned if p.length]
    header = build_header(entries, metadata)
    position = len(header)
    placed = []
    for p in planned:
        placed.append(PlannedRange(p.name, p.kind, p.shape, p.dtype, p.start, p.length, position))
        position += p.length * ITEM_SIZE[p.dtype]
    return RankPlan(header, tuple(placed), position)


def stream_ranges(plan: RankPlan, make_ranges: RangeMaker) -> Iterator[Iterator[memoryview]]:
    """The bytes of each planned range in order, in chunks; only one chunk is in memory at a time."""
    for _, item in expect_ranges(plan, make_ranges):
        yield _chunks(item.values)


def write_rank_file(path: Path, plan: RankPlan, data: Iterable[Iterable[memoryview]]) -> tuple[FileRecord, list[str]]:
    """Write the file of a plan, `data` being the bytes of each range in order, in chunks.

    Returns the file's record and each range's checksum. Raises OSError naming the file.
    """
    checksums = []
    with ChecksummedFile(path) as file:
        file.write(plan.header)
        for chunks in data:
            digest = xxhash.xxh3_64()
            for chunk in chunks:
                digest.update(chunk)
                file.write(chunk)
            checksums.append(digest.hexdigest())
    assert (file.size, len(checksums)) == (plan.size, len(plan.ranges))
    return FileRecord(name=path.name, size=file.size, xxh3_64=file.checksum), checksums


def expect_ranges(plan: RankPlan, make_ranges: RangeMaker) -> Iterator[tuple[PlannedRange, FlatRange]]:
    """The ranges again, each beside its plan, which it must still fit."""
    changed = "the ranges changed between planning and writing"
    ranges = iter(make_ranges())
    for planned in plan.ranges:
        item = next(ranges, None)
        assert item is not None, changed
        same = (item.name, item.kind, item.start, item.values.numel(), DTYPE_NAMES[item.values.dtype])
        assert same == (planned.name, planned.kind, planned.start, planned.length, planned.dtype), (
            f"{changed}: {planned.entry} became {same}"
        )
        yield planned, item
    assert next(ranges, None) is None, changed


def byte_parts(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """A 1-D tensor as uint8 tensors on its own device, each of at most CHUNK_BYTES; views where its memory allows."""
    values = values.detach()
    step = max(1, CHUNK_BYTES // values.element_size())
    for begin in range(0, values.numel(), step):
        yield values[begin : begin + step].contiguous().view(torch.uint8)


def _chunks(values: torch.Tensor) -> Iterator[memoryview]:
    for part in byte_parts(values):
        yield part.to("cpu").numpy().data
