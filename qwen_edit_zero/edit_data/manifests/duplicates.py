"""Rows whose id has been seen before, found exactly and in bounded memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt

_IN_A_PASS = 1 << 21  # rows sorted at once: 2 million hashes and their order take about 50 MB


def duplicates(hashes: npt.NDArray[np.uint64], id_of: Callable[[int], str]) -> Iterator[tuple[int, int]]:
    """(row, first row with the same id) of every row whose id an earlier row has; in no particular order.

    Hashes only say where to look: ids themselves are compared. The rows are gone through in passes by the upper bits
    of their hashes, so that one pass sorts few enough.

    Args:
        hashes: uint64 (rows,), of the ids; may be a memory map.
        id_of: the id of a row.
    """
    bits = max(0, int(len(hashes) - 1).bit_length() - _IN_A_PASS.bit_length() + 1) if len(hashes) else 0
    for upper in range(1 << bits):
        rows = _with_upper_bits(hashes, upper, bits)
        mine = hashes[rows]
        order = np.argsort(mine, kind="stable")  # equal hashes stay in the order of their rows
        ordered = mine[order]
        again = np.flatnonzero(ordered[1:] == ordered[:-1]) + 1
        first_of_run: dict[str, int] = {}
        previous = -1
        for position in again.tolist():
            row = int(rows[order[position]])
            if position != previous + 1:  # a new run of equal hashes begins one before
                first = int(rows[order[position - 1]])
                first_of_run = {id_of(first): first}
            previous = position
            id_ = id_of(row)
            known = first_of_run.setdefault(id_, row)
            if known != row:
                yield row, known


def _with_upper_bits(hashes: npt.NDArray[np.uint64], upper: int, bits: int) -> npt.NDArray[np.int64]:
    if bits == 0:
        return np.arange(len(hashes), dtype=np.int64)
    found = []
    for start in range(0, len(hashes), _IN_A_PASS):
        chunk = hashes[start : start + _IN_A_PASS]
        found.append(np.flatnonzero(chunk >> np.uint64(64 - bits) == np.uint64(upper)) + start)
    return np.concatenate(found)
