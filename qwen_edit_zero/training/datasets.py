"""The tables of samples that a run's settings name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.assets import demo_manifest
from qwen_edit_zero.edit_data.batches.schedule import codes_of
from qwen_edit_zero.edit_data.cache.ranks import Ranks
from qwen_edit_zero.edit_data.manifests.manifest import Manifest, dataset_fingerprint, read_manifest
from qwen_edit_zero.edit_data.manifests.samples import Refusal, Sample
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.settings.models import Settings

DEMO = "demo"


@dataclass(frozen=True)
class DataSet:
    """Some samples of a manifest, in order.

    Attributes:
        title: for messages.
        weights: (n,) of the rows.
        category_codes: (n,) positions in `categories`; "" is no category.
        refused: rows of the manifest that are left out.
        fingerprint: over what the rows say.
    """

    title: str
    samples: Sequence[Sample]
    weights: npt.NDArray[np.float32]
    category_codes: npt.NDArray[np.int32]
    categories: tuple[str, ...]
    refused: Sequence[Refusal]
    fingerprint: str

    def take(self, rows: npt.NDArray[np.int64]) -> DataSet:
        """The samples of these rows, in this order."""
        if len(rows) == len(self.samples):
            return self
        return replace(
            self,
            samples=tuple(self.samples[int(row)] for row in rows),
            weights=self.weights[rows],
            category_codes=self.category_codes[rows],
        )


def training_set(settings: Settings, most_references: int, *, ranks: Ranks, index_folder: Path) -> DataSet:
    """The first data.max_samples rows of data.manifest. Collective. Raises DataError."""
    data = settings.data
    path = _path(data.manifest, "train")
    manifest = read_manifest(path, max_references=most_references, on_error=data.on_error)
    return _data_set(manifest, manifest.samples[: data.max_samples])


def held_out_set(settings: Settings, most_references: int, *, ranks: Ranks, index_folder: Path) -> DataSet | None:
    """sampling.count held-out samples: the first of every category, then the second of every category ...; None if
    there are none. Collective. Raises DataError."""
    data = settings.data
    name = data.validation or (DEMO if data.manifest == DEMO else None)
    if name is None or settings.sampling.count == 0:
        return None
    manifest = read_manifest(_path(name, "validation"), max_references=most_references, on_error=data.on_error)
    turn: dict[str | None, int] = {}
    order = []
    for position, sample in enumerate(manifest.samples):
        turn[sample.category] = turn.get(sample.category, -1) + 1
        order.append((turn[sample.category], position))
    chosen = [position for _, position in sorted(order)[: settings.sampling.count]]
    return _data_set(manifest, tuple(manifest.samples[position] for position in chosen))


def _path(name: str, split: str) -> Path:
    return demo_manifest("train" if split == "train" else "validation") if name == DEMO else Path(name).expanduser()


def _data_set(manifest: Manifest, samples: tuple[Sample, ...]) -> DataSet:
    names = [sample.category or "" for sample in samples]
    return DataSet(
        f"manifest {shown(manifest.path)}",
        samples,
        np.array([sample.weight for sample in samples], np.float32),
        codes_of(names),
        tuple(dict.fromkeys(names)),
        manifest.refused,
        dataset_fingerprint(samples),
    )
