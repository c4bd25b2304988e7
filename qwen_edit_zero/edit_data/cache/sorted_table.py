"""A table of fixed-size records sorted by a 128-bit key, on disk, memory-mapped: for pictures known and entries kept.

A folder: `high.npy` (upper halves of the keys, uint64, sorted), `rest.npy` (lower halves and the records, at the same
positions). It is written beside and renamed, never changed, so any number of processes may have it mapped.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.edit_data.arrays import mapped_array

IN_A_PART = 1 << 20  # records sorted at once
Keys = npt.NDArray[np.uint64]  # (n, 2): upper and lower half of each
Records = npt.NDArray[np.void]


def as_keys(digests: npt.NDArray[np.uint8]) -> Keys:
    """(n, 16) bytes as (n, 2) words; a view where the bytes lie together."""
    return np.ascontiguousarray(digests).view(">u8").astype(np.uint64)


def key_of(digest: bytes) -> tuple[int, int]:
    """16 bytes as the two words of `as_keys`."""
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:], "big")


class SortedKeys:
    """Sorted 128-bit keys: their upper halves, which are searched, and their lower halves."""

    def __init__(self, high: npt.NDArray[np.uint64], low: npt.NDArray[np.uint64]) -> None:
        self.high, self.low = high, low

    @classmethod
    def of(cls, keys: Keys) -> SortedKeys:
        """Of (n, 2) keys in any order."""
        unique = np.unique(keys, axis=0)
        return cls(np.ascontiguousarray(unique[:, 0]), unique[:, 1])

    def __len__(self) -> int:
        return len(self.high)

    def find(self, keys: Keys) -> npt.NDArray[np.int64]:
        """Positions of these keys, -1 where there is none."""
        positions = np.full(len(keys), -1, np.int64)
        if not len(self.high) or not len(keys):
            return positions
        order = np.argsort(keys[:, 0], kind="stable")  # sorted questions walk through the file once
        at = np.empty(len(keys), np.int64)
        at[order] = np.searchsorted(self.high, keys[order, 0])
        left = np.arange(len(keys))
        while len(left):
            left = left[at[left] < len(self.high)]
            left = left[self.high[at[left]] == keys[left, 0]]
            hit = self.low[at[left]] == keys[left, 1]
            positions[left[hit]] = at[left[hit]]
            left = left[~hit]  # another key with the same upper half: look at the next position
            at[left] += 1
        return positions

    def find_one(self, digest: bytes) -> int:
        """Position of one key of 16 bytes, -1 if there is none."""
        high, low = key_of(digest)
        at = int(np.searchsorted(self.high, np.uint64(high)))
        while at < len(self.high) and int(self.high[at]) == high:
            if int(self.low[at]) == low:
                return at
            at += 1
        return -1


class SortedTable(SortedKeys):
    """Opens a table; None: an empty one.

    Attributes:
        records: at the positions that `find` gives.

    Raises:
        OSError: it cannot be read.
        ValueError: it is of another make.
    """

    def __init__(self, folder: Path | None, dtype: np.dtype[np.void]) -> None:
        high: npt.NDArray[np.uint64] = np.zeros(0, np.uint64)
        rest: Records = np.zeros(0, _rest_type(dtype))
        if folder is not None:
            high, rest = mapped_array(folder / "high.npy"), mapped_array(folder / "rest.npy")
            if rest.dtype != _rest_type(dtype) or len(rest) != len(high):
                raise ValueError(f"{folder} is a table of another make")
        super().__init__(high, rest["low"])
        self.records: Records = rest["record"]


def write_in_parts(
    folder: Path,
    record: np.dtype[np.void],
    parts: Iterable[tuple[Keys, Records]],
    files: Mapping[str, str] = {},
) -> Path:
    """Write a table, atomically, which is in memory a part at a time. What is there already stays: it is the same.

    Args:
        record: the type of the records.
        parts: keys and records in any order, of records with one key the last counts; each key of a part is over all
            those of the parts before.
        files: further files of the folder, by name.

    Raises OSError.
    """
    temporary = folder.with_name(f".{folder.name}-{uuid.uuid4().hex}")
    temporary.mkdir(parents=True)
    try:
        rows = 0
        with (temporary / "high").open("wb") as high, (temporary / "rest").open("wb") as rest:
            for keys, records in parts:
                order = _last_of_each(keys)
                values = np.empty(len(order), _rest_type(record))
                values["low"] = keys[order, 1]
                values["record"] = records[order]
                keys[order, 0].tofile(high)
                values.tofile(rest)
                rows += len(order)
        _as_npy(temporary / "high", np.dtype(np.uint64), rows)
        _as_npy(temporary / "rest", _rest_type(record), rows)
        for name, text in files.items():
            (temporary / name).write_text(text, encoding="utf-8")
        os.rename(temporary, folder)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        if not folder.is_dir():
            raise
    return folder


def merged(
    base: SortedTable, added: Callable[[], Iterable[tuple[Keys, Records]]], count: int, *, in_a_part: int = IN_A_PART
) -> Iterator[tuple[Keys, Records]]:
    """What a table and further records hold together, in parts for `write_in_parts`, by the upper bits of the keys.

    Args:
        added: gives the further records in pieces, the same ones at each call; it is called once a part.
        count: how many they are.
    """
    bits = ((len(base) + count) // in_a_part).bit_length()
    for upper in range(1 << bits):
        low, high = upper << (64 - bits), (upper + 1) << (64 - bits)
        start = int(np.searchsorted(base.high, np.uint64(low)))
        end = len(base) if high >> 64 else int(np.searchsorted(base.high, np.uint64(high)))
        keys = [np.stack([base.high[start:end], base.low[start:end]], axis=1)]
        records = [np.array(base.records[start:end])]
        for more_keys, more in added():
            if bits:
                chosen = more_keys[:, 0] >> np.uint64(64 - bits) == np.uint64(upper)
                more_keys, more = more_keys[chosen], more[chosen]
            keys.append(more_keys)
            records.append(more)
        yield np.concatenate(keys), np.concatenate(records)


def _last_of_each(keys: Keys) -> npt.NDArray[np.int64]:
    """Positions of the different keys, sorted by key; of equal ones the last."""
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable: equal keys keep their order
    ordered = keys[order]
    last = np.ones(len(order), bool)
    last[:-1] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return np.asarray(order[last])


def _as_npy(path: Path, dtype: np.dtype[Any], rows: int) -> None:
    """Make a .npy of a file of values, which is deleted."""
    with path.with_suffix(".npy").open("wb") as out, path.open("rb") as values:
        header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": (rows,)}
        np.lib.format.write_array_header_1_0(out, header)
        shutil.copyfileobj(values, out, 16 << 20)
        out.flush()
        os.fsync(out.fileno())  # the name comes after: what a crash of the node leaves must be the whole
    path.unlink()


def _rest_type(record: np.dtype[np.void]) -> np.dtype[np.void]:
    return np.dtype([("low", np.uint64), ("record", record)])
