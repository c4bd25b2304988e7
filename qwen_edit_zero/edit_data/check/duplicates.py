"""Samples that are in a set more than once, by content, found in columns in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.edit_data.check.columns import REFUSED, RowColumns
from qwen_edit_zero.edit_data.manifests.duplicates import duplicates

_CHUNK = 1 << 18
_IN_A_PASS = 1 << 22  # digests sorted at once
Hashes = npt.NDArray[np.uint64]
Rows = npt.NDArray[np.int64]


def usable_rows(columns: RowColumns) -> Rows:
    """Indices of rows that training accepts."""
    return np.flatnonzero(columns.state != REFUSED).astype(np.int64)


def same_samples(columns: RowColumns, rows: Rows) -> Iterator[tuple[int, int, bool]]:
    """(row, an earlier row with its references in order and its instruction, whether the target is the same too).

    Of several earlier rows the first. Masks count as part of the target.
    """
    hashes = _hashes(columns, rows, slice(1, -1), with_words=True)

    def asked(number: int) -> str:
        row = int(rows[number])
        return columns.digests[row, 1:-1].tobytes().hex() + str(int(columns.words[row]))

    for number, first in duplicates(hashes, asked):
        row, earlier = int(rows[number]), int(rows[first])
        shown = [columns.digests[i][[0, -1]].tobytes() for i in (row, earlier)]
        yield row, earlier, shown[0] == shown[1]


def same_targets(columns: RowColumns, rows: Rows) -> Iterator[tuple[int, int]]:
    """(row, the first row with the same target)."""
    hashes = _hashes(columns, rows, slice(0, 1), with_words=False)
    for number, first in duplicates(hashes, lambda number: columns.digests[int(rows[number]), 0].tobytes().hex()):
        yield int(rows[number]), int(rows[first])


def targets_that_are_sources(columns: RowColumns, rows: Rows) -> Rows:
    """Rows whose target is a reference of another row. Compared by 64 bits of the digests."""
    found = []
    bits = max(0, (len(rows) // _IN_A_PASS).bit_length())
    for upper in range(1 << bits):
        targets, owners = _with_upper_bits(columns, rows, slice(0, 1), upper, bits)
        sources, users = _with_upper_bits(columns, rows, slice(1, -1), upper, bits)
        order = np.argsort(sources, kind="stable")
        sources, users = sources[order], users[order]
        begin, end = np.searchsorted(sources, targets), np.searchsorted(sources, targets, side="right")
        some = end > begin
        # of another row: the first or the last of those that show it is not the row itself
        first = users[np.minimum(begin, max(0, len(users) - 1))] if len(users) else owners
        last = users[np.maximum(end - 1, 0)] if len(users) else owners
        found.append(owners[some & ((first != owners) | (last != owners))])
    return np.sort(np.concatenate(found))


def _with_upper_bits(columns: RowColumns, rows: Rows, slots: slice, upper: int, bits: int) -> tuple[Hashes, Rows]:
    """Digests of these slots, by 64 bits, that begin with `upper`; and the row of each."""
    keys, owners = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
    for start in range(0, len(rows), _CHUNK):
        part = rows[start : start + _CHUNK]
        digests = np.ascontiguousarray(columns.digests[part, slots])
        words = digests[..., :8].copy().view("<u8")[..., 0]
        wanted = digests.any(-1)
        if bits:
            wanted &= words >> np.uint64(64 - bits) == np.uint64(upper)
        keys.append(words[wanted].astype(np.uint64))
        owners.append(np.broadcast_to(part[:, None], words.shape)[wanted])
    return np.concatenate(keys), np.concatenate(owners)


def _hashes(columns: RowColumns, rows: Rows, slots: slice, *, with_words: bool) -> Hashes:
    """(n,) 64 bits over the digests of these slots in order, and the words of the instruction if wanted."""
    hashes = np.zeros(len(rows), np.uint64)
    for start in range(0, len(rows), _CHUNK):
        part = rows[start : start + _CHUNK]
        words = np.ascontiguousarray(columns.digests[part, slots][..., :8]).view("<u8")[..., 0]
        mixed = np.array(columns.words[part]) if with_words else np.zeros(len(part), np.uint64)
        for slot in range(words.shape[1]):
            mixed = mixed * np.uint64(0x9E3779B97F4A7C15) + words[:, slot]
        # the upper bits decide the pass, so they must depend on all
        hashes[start : start + _CHUNK] = (mixed ^ (mixed >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return hashes
