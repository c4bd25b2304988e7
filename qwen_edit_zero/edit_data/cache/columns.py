"""Columns about rows: each rank writes those of its part of the rows, rank 0 joins them, all ranks map the whole.

Columns of ten million rows stay on disk: what is written is appended, what is read is memory-mapped.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.edit_data.arrays import mapped_array
from qwen_edit_zero.edit_data.cache.ranks import Ranks

Column = npt.NDArray[Any]
_VISIBLE_SECONDS = 60.0  # in which a network file system shows what another node has written


class Part:
    """This rank's part of a column: appended to, then mapped. `rows` are those so far."""

    def __init__(self, name: str, path: Path, dtype: npt.DTypeLike, shape: tuple[int, ...] = ()) -> None:
        self.name, self.dtype, self.shape = name, np.dtype(dtype), shape
        self.path, self.rows = path, 0
        self._file: BinaryIO | None = path.open("wb")

    def append(self, values: Column) -> None:
        """Add rows. Raises OSError."""
        assert self._file is not None
        assert values.shape[1:] == self.shape, (values.shape, self.shape)
        self._file.write(np.ascontiguousarray(values, self.dtype).data)
        self.rows += len(values)

    def close(self) -> None:
        """Nothing more comes. Idempotent. Raises OSError."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def mapped(self) -> Column:
        """All rows so far, mapped read-only."""
        self.close()
        return _mapped(self.path, 0, self.dtype, self.shape)


class Columns:
    """A folder of columns of one start of a job, deleted at its end. Its methods say which are collective."""

    def __init__(self, folder: Path, ranks: Ranks) -> None:
        self.folder, self.ranks = folder, ranks
        folder.mkdir(parents=True, exist_ok=True)

    def part(self, name: str, dtype: npt.DTypeLike, shape: tuple[int, ...] = ()) -> Part:
        """Begin this rank's part of a column whose rows have this shape."""
        return Part(name, self._part_path(name, self.ranks.rank), dtype, shape)

    def join(self, *parts: Part) -> list[Column]:
        """Join the parts of all ranks, of each column, in rank order; the whole columns, mapped. Collective."""
        for part in parts:
            part.close()
        told = self.ranks.exchange([part.rows for part in parts])
        if self.ranks.first:
            for part, rows in zip(parts, zip(*told, strict=True), strict=True):
                self._join(part, rows)
        self.ranks.wait()
        for part in parts:
            part.path.unlink(missing_ok=True)
        return [self.load(part.name) for part in parts]

    def save(self, name: str, values: Column) -> None:
        """Write a whole column; for rank 0."""
        temporary = self.folder / f".{name}.npy"
        np.save(temporary, values)
        os.replace(temporary, self.folder / f"{name}.npy")

    def load(self, name: str) -> Column:
        """A whole column, mapped read-only."""
        path = self.folder / f"{name}.npy"
        wait_for(path)
        return mapped_array(path)

    def delete(self) -> None:
        """Delete all; what is mapped stays readable where the file system allows that. For rank 0."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def _part_path(self, name: str, rank: int) -> Path:
        return self.folder / f"{name}.{rank:05d}.part"

    def _join(self, part: Part, rows: Sequence[int]) -> None:
        """Join the parts of a column, of so many rows of each rank."""
        name = part.name
        row_bytes = part.dtype.itemsize * int(np.prod(part.shape, dtype=np.int64))
        temporary = self.folder / f".{name}.npy"
        with temporary.open("wb") as out:
            header = {"descr": np.lib.format.dtype_to_descr(part.dtype), "fortran_order": False}
            np.lib.format.write_array_header_2_0(out, header | {"shape": (sum(rows), *part.shape)})
            for rank, count in enumerate(rows):
                path = self._part_path(name, rank)
                wait_for(path, size=count * row_bytes)
                with path.open("rb") as file:
                    shutil.copyfileobj(file, out, 16 << 20)
        os.replace(temporary, self.folder / f"{name}.npy")


def wait_for(path: Path, *, size: int = 0) -> None:
    """Wait until a file that another node has written shows here, with all its bytes. Raises OSError if it does not."""
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not path.exists() or path.stat().st_size < size:
        if time.monotonic() > deadline:
            raise FileNotFoundError(2, "another rank wrote it, but it does not show whole on this node", str(path))
        time.sleep(0.1)
        os.listdir(path.parent)  # makes NFS look again


def _mapped(path: Path, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Column:
    row_bytes = dtype.itemsize * int(np.prod(shape, dtype=np.int64))
    rows = (path.stat().st_size - offset) // row_bytes
    if not rows:
        return np.zeros((0, *shape), dtype)
    return np.asarray(np.memmap(path, dtype, "r", offset, (rows, *shape)))
