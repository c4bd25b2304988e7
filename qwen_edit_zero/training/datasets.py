"""The tables of samples that a run's settings name."""

from __future__ import annotations

from collections.abc import Callable
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


def held_out_table(
    settings: Settings, most_references: int, *, index_folder: Path, rank: int = 0, from_rank_0: Share = _alone
) -> SampleTable | None:
    """sampling.count held-out samples: the first of every category, then the second of every category ...; None if
    there are none. Collective. Raises DataError, StorageError."""
    data = settings.data
    name = data.validation or (data.manifest if data.validation_split or data.manifest == DEMO else None)
    if name is None or settings.sampling.count == 0:
        return None
    table = _open(settings, name, "validation", most_references, rank, index_folder, from_rank_0)
    return table.take(spread_over_categories(table.category_codes, settings.sampling.count))


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
