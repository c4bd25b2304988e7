"""Held-out rows that are trained on as well, by content and by id; found in columns, in memory for the held-out set."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from qwen_edit_zero.edit_data.check.columns import REFUSED, WARNED, RowColumns
from qwen_edit_zero.edit_data.check.findings import Finding, about
from qwen_edit_zero.edit_data.manifests.table import SampleTable

_CHUNK = 1 << 17  # training rows looked at together


def leaks(
    training: SampleTable, columns: RowColumns, held_out: SampleTable, held_columns: RowColumns
) -> Iterator[Finding]:
    """Warnings about held-out rows of which a training row has the pictures, or only the id; in the order of rows.

    Training and held-out rows that are refused do not count.

    Args:
        columns, held_columns: of both tables, when all their rows have been examined.
    """
    held = np.flatnonzero(held_columns.state != REFUSED).tolist()
    copies = _copies(columns, held_columns, held)
    ids = _same_ids(training, columns, {held_out[row].id: row for row in held if row not in copies})
    for row in held:
        if (earlier := copies.get(row, ids.get(row))) is None:
            continue
        sample, other = held_out[row], training[earlier]
        of = f"{training.where(other.line)} (id {other.id}) of the training set"
        kind, text = (
            ("trained-on", f"it has the pictures of {of}")
            if row in copies
            else ("id-trained-on", f"it has the id of {of}, and other pictures")
        )
        held_columns.state[row] = WARNED
        yield about(kind, row, sample, held_out.where(sample.line), text)


def _copies(columns: RowColumns, held_columns: RowColumns, held: list[int]) -> dict[int, int]:
    """The first training row with the target and the references of each of these held-out rows, where there is one."""
    wanted: dict[bytes, list[int]] = {}
    for row in held:
        wanted.setdefault(held_columns.digests[row, :-1].tobytes(), []).append(row)
    targets = np.array([np.frombuffer(key[:8], np.uint64)[0] for key in wanted], np.uint64)
    found: dict[int, int] = {}
    for start in range(0, len(columns), _CHUNK):
        digests = columns.digests[start : start + _CHUNK, :-1]
        first = np.ascontiguousarray(digests[:, 0, :8]).view(np.uint64)[:, 0]
        usable = columns.state[start : start + _CHUNK] != REFUSED
        for number in np.flatnonzero(usable & np.isin(first, targets)).tolist():
            for row in wanted.get(digests[number].tobytes(), ()):
                found.setdefault(row, start + number)
    return found


def _same_ids(training: SampleTable, columns: RowColumns, ids: dict[str, int]) -> dict[int, int]:
    found: dict[int, int] = {}
    if ids:
        for number in np.flatnonzero(columns.state != REFUSED).tolist():
            if (row := ids.get(training[number].id)) is not None:
                found.setdefault(row, number)
    return found
