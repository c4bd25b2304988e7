"""Where the elements of a tensor lie: boxes of it, each a strided stretch of a file. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.checkpoints.foreign.torch_files import StoredBytes
from qwen_edit_zero.safetensors_file import element_count

Shape = tuple[int, ...]
Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Block:
    """Elements `corner .. corner + sizes` of a tensor seen in some shape.

    Attributes:
        stored: the record of a file that holds them.
        first: index in that record of the block's first element.
        corner: where the box begins in the tensor, along each dimension.
        sizes: of the box.
        strides: elements of the record from one index to the next, along each dimension.
    """

    stored: StoredBytes
    first: int
    corner: Shape
    sizes: Shape
    strides: Shape

    @property
    def count(self) -> int:
        """Elements."""
        return element_count(self.sizes)


def flat_block(stored: StoredBytes, first: int, start: int, length: int) -> Block:
    """Elements `start .. start + length` of a flattened tensor, from index `first` of a record on."""
    return Block(stored, first, (start,), (length,), (1,))


def row_major(shape: Sequence[int]) -> Shape:
    """Strides, in elements, of a contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return tuple(reversed(strides))


@dataclass(frozen=True, slots=True)
class Run:
    """`length` elements, one after the other both in the tensor (from `start`) and in the record (from `first`)."""

    start: int
    first: int
    length: int


def run_length(block: Block, shape: Shape) -> int:
    """Elements of each of the equal runs a block consists of."""
    length = 1
    for size, whole, stride in zip(reversed(block.sizes), reversed(shape), reversed(block.strides), strict=True):
        if size == 1 and whole == 1:
            continue
        if size != 1 and stride != length:
            break
        length *= size
        if size != whole:
            break
    return length


class Runs:
    """The runs of a block in the order of the tensor, computed when asked for: there may be millions."""

    def __init__(self, block: Block, shape: Shape) -> None:
        self.length = run_length(block, shape)
        self.count = block.count // self.length if block.count else 0
        tensor_strides = row_major(shape)
        left, axes = self.count, []
        for axis, size in enumerate(block.sizes):  # the leading dimensions that the runs are indexed by
            if left == 1:
                break
            axes.append(axis)
            left //= size
        self._sizes = [block.sizes[a] for a in axes]
        self._tensor = [tensor_strides[a] for a in axes]
        self._record = [block.strides[a] for a in axes]
        self._start = sum(c * s for c, s in zip(block.corner, tensor_strides, strict=True))
        self._first = block.first

    def places(self, low: int, high: int) -> tuple[Indices, Indices]:
        """Start in the tensor and in the record of the runs `low .. high`."""
        index = np.arange(low, high, dtype=np.int64)
        start = np.full(high - low, self._start, dtype=np.int64)
        first = np.full(high - low, self._first, dtype=np.int64)
        for size, tensor, record in zip(
            reversed(self._sizes), reversed(self._tensor), reversed(self._record), strict=True
        ):
            index, digit = np.divmod(index, size)
            start += digit * tensor
            first += digit * record
        return start, first

    def within(self, low: int, high: int) -> tuple[int, int]:
        """Numbers of the first run that reaches beyond element `low`, and of the first that starts after `high - 1`."""
        return self._search(low - self.length + 1), self._search(high)

    def _search(self, element: int) -> int:
        """The first run that starts at or after an element; starts grow with the number."""
        low, high = 0, self.count
        while low < high:
            middle = (low + high) // 2
            if self._start_of(middle) < element:
                low = middle + 1
            else:
                high = middle
        return low

    def _start_of(self, number: int) -> int:
        start = self._start
        for size, tensor in zip(reversed(self._sizes), reversed(self._tensor), strict=True):
            number, digit = divmod(number, size)
            start += digit * tensor
        return start


def cover_fault(blocks: Sequence[Block], shape: Shape) -> str | None:
    """Why the blocks do not cover a tensor seen in `shape` exactly once; None if they do."""
    total = element_count(shape)
    filled = [b for b in blocks if b.count]
    for block in filled:
        if any(c < 0 or c + n > whole for c, n, whole in zip(block.corner, block.sizes, shape, strict=True)):
            return f"{_place(block)} lies outside its shape {list(shape)}"
    if len(shape) <= 1 or all(_is_full_but_first(b, shape) for b in filled):
        return _first_axis_fault(filled, shape)
    if overlap := next(_overlaps(filled), None):
        return f"{_place(overlap[0])} and {_place(overlap[1])} overlap"
    found = sum(b.count for b in filled)
    return None if found == total else f"{total - found} of its {total} elements are nowhere"


def _is_full_but_first(block: Block, shape: Shape) -> bool:
    return block.sizes[1:] == shape[1:]


def _first_axis_fault(blocks: Sequence[Block], shape: Shape) -> str | None:
    if not shape:
        return None if len(blocks) == 1 else f"it is there {len(blocks)} times"
    row, end = element_count(shape[1:]), 0
    if row == 0:
        return None
    for block in sorted(blocks, key=lambda b: b.corner[0]):
        start = block.corner[0]
        if start > end:
            return f"elements {end * row} to {start * row - 1} are nowhere"
        if start < end:
            return f"elements {start * row} to {min(end, start + block.sizes[0]) * row - 1} are there twice"
        end = start + block.sizes[0]
    return f"elements {end * row} to {shape[0] * row - 1} are nowhere" if end < shape[0] else None


def _overlaps(blocks: Sequence[Block]) -> Iterator[tuple[Block, Block]]:
    ordered = sorted(blocks, key=lambda b: b.corner)
    for index, block in enumerate(ordered):
        end = block.corner[0] + block.sizes[0]
        for other in itertools.islice(ordered, index + 1, None):
            if other.corner[0] >= end:
                break
            sides = zip(block.corner, block.sizes, other.corner, other.sizes, strict=True)
            if all(a < c + m and c < a + n for a, n, c, m in sides):
                yield block, other


def _place(block: Block) -> str:
    return f"the box of {list(block.sizes)} at {list(block.corner)} in {block.stored.path.name}"
