"""What is missing in the cache: found by each rank in its rows, made unique by rank 0, split evenly over all."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.edit_data.cache.columns import Columns
from qwen_edit_zero.edit_data.cache.entries import Entries, Kind
from qwen_edit_zero.edit_data.cache.needs import Needs
from qwen_edit_zero.edit_data.cache.sorted_table import as_keys

KINDS: tuple[Kind, ...] = ("prompt", "latent", "mask")  # in the order in which they are made

TODO = np.dtype(
    [
        ("key", np.uint8, 16),
        ("row", "<u8"),  # counted through all sets
        ("variant", "<u2"),
        ("part", "<u2"),  # of latents the picture: 0 the target, then the references; of prompts the text
    ]
)
TodoList = npt.NDArray[np.void]


class Missing:
    """Collects what this rank's rows lack, a column a kind."""

    def __init__(self, columns: Columns, entries: dict[Kind, Entries]) -> None:
        self._columns, self._entries = columns, entries
        self._parts = {kind: columns.part(f"missing-{kind}", TODO) for kind in KINDS}

    def add(self, needs: Needs, first_row: int) -> None:
        """Look for the entries of a chunk whose first row has this number; rows that are refused need none."""
        n, variants, pictures = needs.latents.shape[:3]
        fine = np.ones(n, bool)
        fine[list(needs.reasons)] = False
        row, variant, part = np.indices((n, variants, pictures))
        self._look("latent", needs.latents.reshape(-1, 16), fine[row.ravel()], first_row, row, variant, part)
        row, variant = np.indices((n, variants))
        self._look("mask", needs.masks.reshape(-1, 16), fine[row.ravel()], first_row, row, variant, row * 0)
        counts = needs.texts.astype(np.int64)
        row = np.repeat(np.arange(n), counts * variants)
        position = np.arange(len(row)) - np.repeat(np.cumsum(counts * variants) - counts * variants, counts * variants)
        texts = np.maximum(counts[row], 1)
        self._look("prompt", needs.prompts, fine[row], first_row, row, position // texts, position % texts)

    def _look(self, kind: Kind, keys: npt.NDArray[np.uint8], fine: Any, first_row: int, *where: Any) -> None:
        asked = np.flatnonzero(fine & keys.any(-1))
        if not len(asked):
            return
        lacking = asked[self._entries[kind].missing(as_keys(keys[asked]))]
        todo = np.zeros(len(lacking), TODO)
        todo["key"] = keys[lacking]
        row, variant, part = (axis.ravel()[lacking] for axis in where)
        todo["row"], todo["variant"], todo["part"] = first_row + row, variant, part
        self._parts[kind].append(todo)

    def share(self) -> dict[Kind, TodoList]:
        """This rank's even share of what is missing anywhere, each entry once, in the order of rows. Collective."""
        joined = self._columns.join(*self._parts.values())
        ranks = self._columns.ranks
        shares: dict[Kind, TodoList] = {}
        for kind, everything in zip(self._parts, joined, strict=True):
            if ranks.first:
                self._columns.save(f"todo-{kind}", _each_once(everything))
            ranks.wait()
            todo = self._columns.load(f"todo-{kind}")
            mine = ranks.share(len(todo))
            shares[kind] = todo[mine.start : mine.stop]
        return shares


def _each_once(todo: TodoList) -> TodoList:
    """The first of those with one key, in the order of rows."""
    keys = as_keys(todo["key"])
    order = np.lexsort((keys[:, 1], keys[:, 0]))  # stable
    ordered = keys[order]
    first = np.ones(len(order), bool)
    first[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    return np.asarray(todo[np.sort(order[first])])


def groups(todo: TodoList) -> Iterator[TodoList]:
    """Runs of one sample's variant, whose pictures are the same."""
    if not len(todo):
        return
    changes = np.flatnonzero((np.diff(todo["row"]) != 0) | (np.diff(todo["variant"]) != 0)) + 1
    starts = [0, *changes.tolist(), len(todo)]
    for start, end in pairwise(starts):
        yield todo[start:end]
