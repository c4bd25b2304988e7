"""Held-out samples that are trained on as well: what is measured on them says little about new edits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import numpy as np

from qwen_edit_zero.edit_data.cache.sets import PreparedSet
from qwen_edit_zero.edit_data.manifests.samples import Sample
from qwen_edit_zero.edit_data.manifests.table import SampleTable
from qwen_edit_zero.edit_data.wording import shown

_CHUNK = 1 << 18  # rows whose keys are looked at together
_NAMED = 5  # samples in a warning


class SameIds:
    """Collects which of some ids training samples have, as they are looked at."""

    def __init__(self, ids: Iterable[str]) -> None:
        self._ids, self._found = frozenset(ids), set[str]()

    def look_at(self, sample: Sample) -> None:
        """A sample is trained on."""
        if sample.id in self._ids:
            self._found.add(sample.id)

    def of_all(self, exchange: Callable[[Any], list[Any]]) -> frozenset[str]:
        """Those that any rank has found. Collective."""
        return frozenset().union(*exchange(self._found))


def leakage(training: PreparedSet, held_out: PreparedSet, table: SampleTable, same_ids: Collection[str]) -> list[str]:
    """Warnings, in words; none if no held-out sample is trained on.

    Args:
        table: of which `held_out` are the samples.
        same_ids: ids of held-out samples that training samples have as well.
    """
    names = [table[row].id for row in held_out.rows.tolist()]
    pictures = {names[i] for i in same_pictures(training, held_out)}
    count = f"of {len(names):,} held-out samples"
    told = []
    if pictures:
        told.append(
            f"{len(pictures):,} {count} show the same pictures as samples that are trained on: "
            f"{_listed(names, pictures)}. What is measured and pictured on them says nothing about new edits: take "
            "them out of one of the sets, or keep the sets apart by data.split and data.validation_split"
        )
    others = set(names).intersection(same_ids) - pictures
    if others:
        told.append(
            f"{len(others):,} {count} have the ids of training samples with other pictures: "
            f"{_listed(names, others)}. If they are the same edits in other files, take them out of one of the sets"
        )
    return told


def same_pictures(training: PreparedSet, held_out: PreparedSet) -> list[int]:
    """Numbers of the held-out samples whose target and references, as they are prepared, a training sample has."""
    copies: dict[bytes, list[int]] = {}
    for i in range(len(held_out)):
        copies.setdefault(held_out.latents[i, 0].tobytes(), []).append(i)
    targets = np.array([np.frombuffer(key[:8], np.uint64)[0] for key in copies], np.uint64)
    found = set[bytes]()
    for start in range(0, len(training), _CHUNK):
        chunk = training.latents[start : start + _CHUNK, 0]
        first = np.ascontiguousarray(chunk[:, 0, :8]).view(np.uint64)[:, 0]
        for row in np.flatnonzero(np.isin(first, targets)).tolist():
            key = chunk[row].tobytes()
            if key in copies:
                found.add(key)
    return sorted(i for key in found for i in copies[key])


def _listed(names: list[str], chosen: Collection[str]) -> str:
    """The first few of `chosen`, in the order of `names`."""
    ordered = list(dict.fromkeys(name for name in names if name in chosen))
    more = f" and {len(ordered) - _NAMED:,} more" if len(ordered) > _NAMED else ""
    return ", ".join(shown(name) for name in ordered[:_NAMED]) + more
