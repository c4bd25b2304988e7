"""A set in numbers: counts by category, language, size, bucket and so on, made from the columns piece by piece."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.edit_data.check.columns import REFUSED, WARNED, RowColumns
from qwen_edit_zero.edit_data.check.texts import LANGUAGES
from qwen_edit_zero.edit_data.manifests.table import SampleTable
from qwen_edit_zero.edit_data.pictures.alignment import Align, prepared_sizes

_CHUNK = 1 << 17  # rows looked at together
_MEGAPIXELS = (0, 0.0625, 0.125, 0.25, 0.5, 1, 2, 4, 8, 16, 32, 64, 128)
_ASPECTS = (0, 0.25, 0.4, 0.52, 0.6, 0.7, 0.78, 0.9, 0.98, 1.02, 1.1, 1.28, 1.45, 1.7, 1.9, 2.5, 4, 1e9)
_LONGEST = (0, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096, 1 << 30)
_LENGTHS = (0, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1 << 30)


@dataclass
class Share:
    """Rows of one category or language."""

    rows: int = 0
    refused: int = 0
    warned: int = 0


@dataclass
class Histogram:
    """Counts of values from each edge to the one after it, which does not belong there; the last part is open.

    Attributes:
        whole: whether the values are whole numbers.
    """

    edges: tuple[float, ...]
    whole: bool = False
    counts: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))

    def __post_init__(self) -> None:
        self.counts = np.zeros(len(self.edges) - 1, np.int64)

    def add(self, values: npt.NDArray[np.generic]) -> None:
        """Count these; each belongs to the last edge that is not over it."""
        at = np.searchsorted(self.edges, values, side="right") - 1
        self.counts += np.bincount(np.clip(at, 0, len(self.counts) - 1), minlength=len(self.counts))


@dataclass
class Summary:
    """All numbers but those of findings. Sizes and so on are of rows that are accepted.

    Attributes:
        references: rows by their number of references.
        buckets: rows by the prepared sizes of target and references, (width, height) each.
        sizes: rows by the size of their target.
        masks: rows with one.
        tokens: whether `lengths` are tokens, else characters.
        rare_rows: of buckets with fewer rows than an optimizer step has; `rare` are the first of them.
    """

    categories: dict[str, Share] = field(default_factory=dict)
    languages: dict[str, Share] = field(default_factory=dict)
    references: Counter[int] = field(default_factory=Counter)
    buckets: Counter[tuple[tuple[int, int], ...]] = field(default_factory=Counter)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    masks: int = 0
    megapixels: Histogram = field(default_factory=lambda: Histogram(_MEGAPIXELS))
    aspects: Histogram = field(default_factory=lambda: Histogram(_ASPECTS))
    longest: Histogram = field(default_factory=lambda: Histogram(_LONGEST, whole=True))
    lengths: Histogram = field(default_factory=lambda: Histogram(_LENGTHS, whole=True))
    tokens: bool = False
    rare_rows: int = 0
    rare: list[int] = field(default_factory=list)


def summarise(
    table: SampleTable, columns: RowColumns, *, area: int, align: Align, step: int, tokens: bool, examples: int
) -> Summary:
    """The summary of a table that has been examined.

    Args:
        area: data.vae_area.
        step: samples of an optimizer step.
        examples: how many of the rows in rare buckets are listed.
    """
    found = Summary(tokens=tokens)
    codes = table.category_codes
    categories = _Shares(table.categories)
    languages = _Shares(LANGUAGES)
    for start in range(0, len(columns), _CHUNK):
        part = slice(start, start + _CHUNK)
        state = columns.state[part]
        categories.add(codes[part], state)
        languages.add(columns.language[part], state)
        usable = state != REFUSED
        sizes = columns.sizes[part][usable]
        pictures = sizes[:, :-1]
        found.masks += int((sizes[:, -1] > 0).all(-1).sum())
        found.lengths.add(columns.length[part][usable])
        found.references.update(_counted((pictures[:, 1:, 0] > 0).sum(1)))
        target = pictures[:, 0].astype(np.float64)
        found.megapixels.add(target.prod(-1) / 1e6)
        found.aspects.add(target[:, 0] / target[:, 1])
        found.longest.add(target.max(-1))
        for size, count in _rows_counted(pictures[:, 0]):
            found.sizes[size[0], size[1]] += count
        _keep(found.sizes)
        for key, count in _rows_counted(_prepared(pictures, area, align)):
            found.buckets[_pairs(key)] += count
    found.categories, found.languages = categories.named(), languages.named()
    rare = {bucket for bucket, count in found.buckets.items() if count < step}
    found.rare_rows = sum(found.buckets[bucket] for bucket in rare)
    if rare:
        found.rare = _first_of(columns, rare, area, align, examples)
    return found


class _Shares:
    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._counts = np.zeros((3, len(names)), np.int64)

    def add(self, codes: npt.NDArray[np.integer], state: npt.NDArray[np.uint8]) -> None:
        for at, chosen in enumerate((slice(None), state == REFUSED, state == WARNED)):
            self._counts[at] += np.bincount(codes[chosen], minlength=len(self._names))

    def named(self) -> dict[str, Share]:
        """Largest first; those without rows are left out."""
        order = np.argsort(-self._counts[0], kind="stable").tolist()
        return {self._names[i]: Share(*self._counts[:, i].tolist()) for i in order if self._counts[0, i]}


def _prepared(pictures: npt.NDArray[np.int32], area: int, align: Align) -> npt.NDArray[np.int32]:
    return prepared_sizes(pictures, area=area, align=align).reshape(len(pictures), 2 * pictures.shape[1])


def _rows_counted(values: npt.NDArray[np.int32]) -> list[tuple[tuple[int, ...], int]]:
    """Each different row of (n, k), and how often it is there."""
    if not len(values):
        return []
    as_one = np.ascontiguousarray(values).view(np.dtype((np.void, values.dtype.itemsize * values.shape[1]))).ravel()
    _, first, counts = np.unique(as_one, return_index=True, return_counts=True)
    return [(tuple(values[i].tolist()), n) for i, n in zip(first.tolist(), counts.tolist(), strict=True)]


def _counted(values: npt.NDArray[np.integer]) -> dict[int, int]:
    different, counts = np.unique(values, return_counts=True)
    return dict(zip(different.tolist(), counts.tolist(), strict=True))


def _pairs(flat: tuple[int, ...]) -> tuple[tuple[int, int], ...]:
    """The sides of pictures that are there."""
    return tuple((flat[i], flat[i + 1]) for i in range(0, len(flat), 2) if flat[i])


def _keep(sizes: Counter[tuple[int, int]], most: int = 100_000) -> None:
    """Web pictures have any size: only frequent ones are of interest, and memory is bounded."""
    if len(sizes) > 2 * most:
        kept = sizes.most_common(most)
        sizes.clear()
        sizes.update(dict(kept))


def _first_of(
    columns: RowColumns, buckets: set[tuple[tuple[int, int], ...]], area: int, align: Align, most: int
) -> list[int]:
    """The first rows that are in these buckets."""
    rows: list[int] = []
    for start in range(0, len(columns), _CHUNK):
        usable = np.flatnonzero(columns.state[start : start + _CHUNK] != REFUSED)
        prepared = _prepared(columns.sizes[start : start + _CHUNK][usable][:, :-1], area, align)
        for row, flat in zip(usable.tolist(), prepared.tolist(), strict=True):
            if _pairs(tuple(flat)) in buckets:
                rows.append(start + row)
                if len(rows) == most:
                    return rows
    return rows
