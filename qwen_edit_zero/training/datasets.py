"""The tables of samples that a run's settings name."""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.assets import demo_manifest
from qwen_edit_zero.edit_data.manifests.opening import open_manifest
from qwen_edit_zero.edit_data.manifests.table import SampleTable
from qwen_edit_zero.edit_data.storage.options import StorageOptions
from qwen_edit_zero.settings.models import Settings

DEMO = "demo"
MANIFESTS = "manifests"  # folder of the cache with the indexes of manifests
Share = Callable[[Any], Any]


def _alone(value: Any) -> Any:
    return value


def training_table(
    settings: Settings, most_references: int, *, index_folder: Path, rank: int = 0, from_rank_0: Share = _alone
) -> SampleTable:
    """The first data.max_samples rows of data.manifest. Collective: `from_rank_0` gives rank 0's small object to all.

    Raises DataError, StorageError.
    """
    table = _open(settings, settings.data.manifest, "train", most_references, rank, index_folder, from_rank_0)
    return table[: settings.data.max_samples]


@dataclass(frozen=True)
class HeldOutTable:
    """Held-out samples, and what each is for.

    Attributes:
        table: those to picture, in their order, and after them the others whose loss is computed.
        pictured: how many of them, from the first, are pictured.
        validated: (n,) bool, those whose loss is computed.
        available: samples in the whole held-out set.
    """

    table: SampleTable
    pictured: int
    validated: npt.NDArray[np.bool_]
    available: int

    def pictured_ids(self) -> frozenset[str]:
        """Ids of the samples to picture."""
        return frozenset(sample.id for sample in self.table[: self.pictured])


def held_out_manifest(settings: Settings) -> str | None:
    """Where the held-out samples are; None if none are named."""
    data = settings.data
    return data.validation or (data.manifest if data.validation_split or data.manifest == DEMO else None)


def whole_held_out_table(
    settings: Settings, most_references: int, *, index_folder: Path, rank: int = 0, from_rank_0: Share = _alone
) -> SampleTable | None:
    """All held-out samples, whether a run uses them or not. None if none are named. As `training_table`."""
    name = held_out_manifest(settings)
    if name is None:
        return None
    return _open(settings, name, "validation", most_references, rank, index_folder, from_rank_0)


def wants_held_out(settings: Settings) -> bool:
    """Whether a run uses held-out samples."""
    return settings.sampling.count > 0 or settings.validation.every is not None


def held_out_table(
    settings: Settings, most_references: int, *, index_folder: Path, rank: int = 0, from_rank_0: Share = _alone
) -> HeldOutTable | None:
    """sampling.count held-out samples for pictures: the first of every category, then the second of every category ...;
    and up to validation.samples for the loss, if there is to be one (`chosen_by_id`). None if none are wanted.
    Collective. Raises DataError, StorageError."""
    if not wants_held_out(settings):
        return None
    table = whole_held_out_table(
        settings, most_references, index_folder=index_folder, rank=rank, from_rank_0=from_rank_0
    )
    return None if table is None else chosen_of(table, settings, rank=rank, from_rank_0=from_rank_0)


def chosen_of(table: SampleTable, settings: Settings, *, rank: int = 0, from_rank_0: Share = _alone) -> HeldOutTable:
    """What a run uses of the whole held-out set; see `held_out_table`. Collective."""
    validation = settings.validation
    pictured = spread_over_categories(table.category_codes, settings.sampling.count)
    validated = np.zeros(0, np.int64)
    if validation.every is not None:
        chosen = chosen_by_id(table, validation.samples, seed=validation.seed) if rank == 0 else None
        validated = np.asarray(from_rank_0(chosen), np.int64)
    rows = np.concatenate([pictured, validated[~np.isin(validated, pictured)]])
    return HeldOutTable(table.take(rows), len(pictured), np.isin(rows, validated), len(table))


def chosen_by_id(table: SampleTable, count: int, *, seed: int) -> list[int]:
    """Positions of `count` samples, those whose ids have the lowest hashes, in the table's order; all if there are no
    more. So a choice does not depend on the order of rows, and a new row seldom changes it."""
    if len(table) <= count:
        return list(range(len(table)))
    hashes = ((_hash(seed, sample.id), position) for position, sample in enumerate(table))
    return sorted(position for _, position in heapq.nsmallest(count, hashes))


def _hash(seed: int, name: str) -> bytes:
    return hashlib.blake2b(f"validation\0{seed}\0{name}".encode(), digest_size=16).digest()


def spread_over_categories(codes: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.int64]:
    """`count` positions: the first of every category, then the second of every category ..., each turn in order."""
    by_category = np.argsort(codes, kind="stable")
    ordered = codes[by_category]
    starts = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
    turn = np.empty(len(codes), np.int64)
    turn[by_category] = np.arange(len(codes)) - np.repeat(starts, np.diff(np.append(starts, len(codes))))
    return np.lexsort((np.arange(len(codes)), turn))[:count]


def _open(
    settings: Settings, name: str, use: str, most_references: int, rank: int, index_folder: Path, from_rank_0: Share
) -> SampleTable:
    """The table of a manifest for "train" or "validation"."""
    data = settings.data
    return open_manifest(
        demo_manifest("train" if use == "train" else "validation") if name == DEMO else name,
        max_references=most_references,
        on_error=data.on_error,
        split=data.split if use == "train" else data.validation_split,
        index_folder=index_folder,
        form=data.format if name == data.manifest else "auto",
        outside=data.outside,
        columns=data.columns,
        storage=StorageOptions.of(data.storage, index_dir=index_folder / "archives"),
        rank=rank,
        from_rank_0=from_rank_0,
    )
