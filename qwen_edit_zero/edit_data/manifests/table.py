"""The samples of a manifest as a table on disk: rows parsed on demand, columns memory-mapped."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import xxhash

from qwen_edit_zero.edit_data.manifests.index import Index
from qwen_edit_zero.edit_data.manifests.samples import Refusal, Sample
from qwen_edit_zero.edit_data.storage.files import Place


class RefusedRows(Sequence[Refusal]):
    """The rows of a manifest that are left out, in order; read from the index when asked for."""

    def __init__(self, index: Index) -> None:
        self._index = index

    def __len__(self) -> int:
        return self._index.header.refused

    @overload
    def __getitem__(self, number: int) -> Refusal: ...
    @overload
    def __getitem__(self, number: slice) -> list[Refusal]: ...
    def __getitem__(self, number: int | slice) -> Refusal | list[Refusal]:
        if isinstance(number, slice):
            return [self[i] for i in range(*number.indices(len(self)))]
        if not -len(self) <= number < len(self):
            raise IndexError(number)
        line, id_, reason = self._index.refusal(number % len(self))
        return Refusal(line, id_, reason, self._index.header.where(line))


class SampleTable(Sequence[Sample]):
    """The samples of a manifest, or some of them, in the order of their rows unless they were taken in another.

    The columns of a whole table are memory maps; those of a selection are copies, 4 to 8 bytes a row each, made when
    first asked for. May be shared by threads and by forked processes, and pickled cheaply.

    Args:
        place: what the names in it are relative to.
        selection: int64 (n,), the rows of the index that are in the table; None: all.
        name: what messages call the manifest.
    """

    def __init__(
        self, index: Index, place: Place, *, name: str, selection: npt.NDArray[np.int64] | None = None
    ) -> None:
        self._index, self.place, self.name, self._selection = index, place, name, selection

    def __len__(self) -> int:
        return self._index.header.rows if self._selection is None else len(self._selection)

    @overload
    def __getitem__(self, number: int) -> Sample: ...
    @overload
    def __getitem__(self, number: slice) -> SampleTable: ...
    def __getitem__(self, number: int | slice) -> Sample | SampleTable:
        if isinstance(number, slice):
            rows = range(*number.indices(len(self)))
            return self if rows == range(len(self)) else self.take(np.arange(rows.start, rows.stop, rows.step))
        if not -len(self) <= number < len(self):
            raise IndexError(f"sample {number} of {len(self)}")
        at = int(number) % len(self)
        if self._selection is not None:
            at = int(self._selection[at])
        columns, row = self._index.columns, self._index.row(at)
        return Sample(
            str(row.id), self.place, row.sources, row.instruction, row.target, row.category,
            float(columns["weight"][at]), int(columns["line"][at]), row.mask, row.split, row.paraphrases,
        )  # fmt: skip

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def take(self, indices: npt.NDArray[np.int64]) -> SampleTable:
        """The samples at these indices, in this order."""
        chosen = np.ascontiguousarray(indices, np.int64)
        if self._selection is not None:
            chosen = self._selection[chosen]
        elif len(chosen) == len(self) and bool((chosen == np.arange(len(self))).all()):
            return self
        elif len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < len(self):
            raise IndexError(f"samples {chosen.min()} to {chosen.max()} of {len(self)}")
        return SampleTable(self._index, self.place, name=self.name, selection=chosen)

    def of_split(self, split: str) -> SampleTable:
        """The samples of a split; those without one belong to "train". See `splits` for what there is."""
        header = self._index.header
        codes = [i for i, name in enumerate(header.splits) if name == split or (split == "train" and not name)]
        return self.take(np.flatnonzero(np.isin(self._column("split"), codes)).astype(np.int64))

    @cached_property
    def fingerprint(self) -> str:
        """32 hex digits over the rows and their order; not over where they lie, their format, or any picture."""
        if self._selection is None:
            return self._index.header.fingerprint
        digest = xxhash.xxh3_128(self._index.header.fingerprint.encode())
        digest.update(self._selection.data)
        return digest.hexdigest()

    @property
    def categories(self) -> tuple[str, ...]:
        """What `category_codes` stand for; "" is no category."""
        return tuple(self._index.header.categories)

    @cached_property
    def category_codes(self) -> npt.NDArray[np.int32]:
        """int32 (n,): index into `categories`."""
        return self._column("category")

    @cached_property
    def weights(self) -> npt.NDArray[np.float32]:
        """float32 (n,)."""
        return self._column("weight")

    @cached_property
    def lines(self) -> npt.NDArray[np.int64]:
        """int64 (n,): line or row of the manifest, from 1."""
        return self._column("line")

    @property
    def splits(self) -> dict[str, int]:
        """Rows of each split in the whole manifest; "" is none."""
        return dict(zip(self._index.header.splits, self._index.header.split_counts, strict=True))

    @property
    def refused(self) -> RefusedRows:
        """The rows of the whole manifest that are left out."""
        return RefusedRows(self._index)

    @property
    def refused_reasons(self) -> dict[str, int]:
        """How many were left out for what, most first; names and numbers are taken out of the reasons."""
        return dict(self._index.header.reasons)

    @property
    def index_folder(self) -> str:
        """Where the index lies."""
        return str(self._index.folder)

    def where(self, line: int) -> str:
        """A line of the manifest as messages call it: with its file, if there are several."""
        return self._index.header.where(line)

    def describe(self) -> str:
        """One line: the manifest, the format it was recognised as, and what is in it."""
        header = self._index.header
        whole = header.rows
        told = f"manifest {self.name}: {header.title}, {whole:,} row{'s' if whole != 1 else ''}"
        if header.refused:
            told += f", {header.refused:,} refused"
        if len(self) != whole:
            told += f", {len(self):,} taken"
        if header.splits not in ([], [""]):
            counts = ", ".join(f"{split or 'none'} {count:,}" for split, count in self.splits.items())
            told += f" (splits: {counts})"
        return "; ".join([told, *header.notes])

    def _column(self, name: str) -> npt.NDArray[Any]:
        column = self._index.columns[name]
        return column if self._selection is None else column[self._selection]
