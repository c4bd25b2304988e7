"""The tables of samples that a run's settings name, and the texts that their instructions become."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.assets import demo_manifest
from qwen_edit_zero.cluster.collectives import from_rank_0
from qwen_edit_zero.edit_data.instructions.prepare import Candidates, Instructions, Tally
from qwen_edit_zero.edit_data.manifests.opening import open_manifest
from qwen_edit_zero.edit_data.manifests.samples import Sample
from qwen_edit_zero.edit_data.manifests.table import SampleTable
from qwen_edit_zero.errors import DataError
from qwen_edit_zero.settings.models import Settings

DEMO = "demo"


def training_table(settings: Settings, most_references: int, *, rank: int, index_folder: Path) -> SampleTable:
    """The first data.max_samples rows of data.manifest. Collective. Raises DataError, StorageError."""
    table = _open(settings, settings.data.manifest, "train", most_references, rank, index_folder)
    return table[: settings.data.max_samples]


def held_out_table(settings: Settings, most_references: int, *, rank: int, index_folder: Path) -> SampleTable | None:
    """sampling.count held-out samples: the first of every category, then the second of every category ...; None if
    there are none. Collective. Raises DataError, StorageError."""
    data = settings.data
    name = data.validation or (data.manifest if data.validation_split or data.manifest == DEMO else None)
    if name is None or settings.sampling.count == 0:
        return None
    table = _open(settings, name, "validation", most_references, rank, index_folder)
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
    settings: Settings, name: str, use: str, most_references: int, rank: int, index_folder: Path
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
        rank=rank,
        from_rank_0=from_rank_0,
    )


class TrainingTexts:
    """The texts that a training sample may be trained on, as `needs.Making` wants them.

    Attributes:
        tally: counts over the samples that were given to `count`.
    """

    def __init__(self, instructions: Instructions) -> None:
        self.tally = Tally()
        self._instructions = instructions
        self._candidates = lru_cache(maxsize=1 << 14)(self._made)  # asked for several times while a row is looked at

    def __call__(self, sample: Sample) -> tuple[str, ...]:
        """All texts of a sample, in order. Raises DataError if the row is refused."""
        made = self._candidates(sample.instruction, sample.paraphrases)
        if made.refusal:
            raise DataError(made.refusal)
        return made.texts

    def count(self, sample: Sample) -> None:
        """Count what was done to a sample's instruction."""
        self.tally.add(self._candidates(sample.instruction, sample.paraphrases).prepared[0])

    def judge(self, sample: Sample) -> None:
        """Ask the classifier, if there is one. Raises DataError if the row is refused, RunError if it fails."""
        prepared = self._instructions.prepare(sample.instruction)
        refusal = self._instructions.classify(prepared, (*sample.sources, sample.target)).refusal
        if refusal:
            raise DataError(refusal)

    def _made(self, instruction: str, paraphrases: tuple[str, ...]) -> Candidates:
        return self._instructions.candidates(_Texts(instruction, paraphrases))


class _Texts:
    """What of a sample decides its texts."""

    def __init__(self, instruction: str, paraphrases: tuple[str, ...]) -> None:
        self.instruction, self.paraphrases = instruction, paraphrases


class HeldOutTexts:
    """A held-out sample's instruction, and for guidance what leads away from it."""

    def __init__(self, instructions: Instructions, negative: str | None) -> None:
        self._instructions = instructions
        self._negative = () if negative is None else (negative,)

    def __call__(self, sample: Sample) -> tuple[str, ...]:
        """The texts. Raises DataError if the row is refused."""
        prepared = self._instructions.prepare(sample.instruction)
        if prepared.refusal:
            raise DataError(prepared.refusal)
        return (prepared.text, *self._negative)
