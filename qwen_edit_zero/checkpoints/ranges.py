"""Where the elements of a tensor lie: stored ranges, by the million if need be, and what a read needs of them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, overload

import numpy as np
import numpy.typing as npt


class StoredRange(NamedTuple):
    """Elements `start .. start + length` of a flattened tensor.

    They lie in `files[file]` of the manifest, `offset` bytes from that file's start. `xxh3_64` is their checksum, 16
    hexadecimal digits.
    """

    file: int
    offset: int
    start: int
    length: int
    xxh3_64: str


@dataclass(frozen=True)
class RangeTable:
    """Every range of a checkpoint, tensor by tensor in the manifest's order, each tensor's sorted by `start`.

    A range ends where the next of its tensor begins, the last one at the tensor's end: so a table has no holes and no
    overlaps whatever is in it.
    """

    file: npt.NDArray[np.int32]
    offset: npt.NDArray[np.int64]
    start: npt.NDArray[np.int64]
    xxh3_64: npt.NDArray[np.uint64]

    def columns(self) -> dict[str, npt.NDArray[Any]]:
        """As `write_columns` takes them."""
        return {"file": self.file, "offset": self.offset, "start": self.start, "xxh3_64": self.xxh3_64}

    @classmethod
    def of_columns(cls, columns: Mapping[str, npt.NDArray[Any]]) -> RangeTable:
        """The opposite. Raises ValueError if these are other columns."""
        lengths = {len(column) for column in columns.values()}
        if set(columns) != {"file", "offset", "start", "xxh3_64"} or len(lengths) != 1:
            raise ValueError(f"its columns are {sorted(columns)} of {sorted(lengths)} rows")
        return cls(**columns)


class Ranges(Sequence[StoredRange]):
    """The ranges of one tensor: rows `first .. first + count` of a table; `elements` is the size of the tensor."""

    __slots__ = ("_count", "_elements", "_first", "_table")

    def __init__(self, table: RangeTable, first: int, count: int, elements: int) -> None:
        self._table, self._first, self._count, self._elements = table, first, count, elements

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> StoredRange: ...

    @overload
    def __getitem__(self, index: slice) -> list[StoredRange]: ...

    def __getitem__(self, index: int | slice) -> StoredRange | list[StoredRange]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._count))]
        if not -self._count <= index < self._count:
            raise IndexError(index)
        number = index % self._count
        row, table = self._first + number, self._table
        start = int(table.start[row])
        end = int(table.start[row + 1]) if number + 1 < self._count else self._elements
        checksum = f"{int(table.xxh3_64[row]):016x}"
        return StoredRange(int(table.file[row]), int(table.offset[row]), start, end - start, checksum)

    @property
    def first_row(self) -> int:
        """The table's row of the first range; those of the others follow."""
        return self._first

    def index_at(self, element: int) -> int:
        """Number of the range that holds an element."""
        starts = self._table.start[self._first : self._first + self._count]
        return max(0, int(np.searchsorted(starts, element, side="right")) - 1)

    def places(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int64]]:
        """Of each range its file and its offset in it."""
        rows = slice(self._first, self._first + self._count)
        return self._table.file[rows], self._table.offset[rows]

    def byte_sizes(self, item_size: int) -> npt.NDArray[np.int64]:
        """Bytes of each range."""
        starts = self._table.start[self._first : self._first + self._count]
        return np.diff(starts, append=self._elements) * item_size

    def in_file(self, file: int) -> Iterator[StoredRange]:
        """Those that lie in one file."""
        rows = slice(self._first, self._first + self._count)
        for number in np.flatnonzero(self._table.file[rows] == file):
            yield self[int(number)]

    def fault(self, item_size: int, file_sizes: npt.NDArray[np.int64]) -> str | None:
        """Why these rows cannot be right; None if they can."""
        if (self._count == 0) != (self._elements == 0):
            return f"it has {self._elements} elements in {self._count} ranges"
        if self._count == 0:
            return None
        rows = slice(self._first, self._first + self._count)
        start, file = self._table.start[rows], self._table.file[rows]
        lengths = np.diff(start, append=self._elements)
        if start[0] != 0 or (lengths <= 0).any():
            return "its ranges are not in order"
        if file.min() < 0 or file.max() >= len(file_sizes):
            return "some of its ranges are in no file"
        offset = self._table.offset[rows]
        if offset.min() < 0 or (offset + lengths * item_size > file_sizes[file]).any():
            return "some of its elements lie beyond the end of their file"
        return None


def coverage_fault(count: int, ranges: Sequence[StoredRange]) -> str | None:
    """Why `ranges`, sorted by start, do not cover elements `0 .. count` exactly once; None if they do."""
    end = 0
    for item in ranges:
        if item.start > end:
            return f"elements {end} to {item.start - 1} are nowhere"
        if item.start < end:
            return f"elements {item.start} to {min(end, item.start + item.length) - 1} are there twice"
        end = item.start + item.length
    if end < count:
        return f"elements {end} to {count - 1} are nowhere"
    return f"there are {end} elements, but its shape has {count}" if end > count else None


class Piece(NamedTuple):
    """The part of a stored range that a read needs: elements `skip .. skip + take` of it go to `at` of the result.

    `number` is that of the range among those of its tensor.
    """

    stored: StoredRange
    skip: int
    take: int
    at: int
    number: int


def intersect(ranges: Sequence[StoredRange], start: int, length: int) -> Iterator[Piece]:
    """The pieces, in order, that make up elements `start .. start + length`; `ranges` sorted, without holes."""
    end, position = start + length, start
    if isinstance(ranges, Ranges):
        index = ranges.index_at(start)
    else:
        index = max(0, bisect_right(ranges, start, key=lambda r: r.start) - 1)
    while position < end:
        stored = ranges[index]
        skip = position - stored.start
        take = min(end - position, stored.length - skip)
        if take > 0:
            yield Piece(stored, skip, take, position - start, index)
            position += take
        index += 1
