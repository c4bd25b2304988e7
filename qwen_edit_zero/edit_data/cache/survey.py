"""A look at all pictures of a table: sizes and content digests, or why a row cannot be used.

Pictures that have not changed since they were looked at are not read again (`facts`): a survey of known pictures asks
the file system about each, and no more. Work is done in chunks of rows, by threads; nothing grows with the rows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.edit_data.cache.facts import FACT, NAMED_FACT, Facts, name_key
from qwen_edit_zero.edit_data.cache.files import look_at, pictures_of, stamp_hash
from qwen_edit_zero.edit_data.cache.sorted_table import as_keys
from qwen_edit_zero.edit_data.manifests.samples import Sample
from qwen_edit_zero.edit_data.pictures.decode import RULES_VERSION
from qwen_edit_zero.edit_data.storage.files import NotThereError, PictureFile
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError

CHUNK = 2048  # rows looked at together
_THREADS = 16
_MOST_EXPLAINED = 100  # missing pictures for which the nearest name is looked for
_REMEMBERED = 200_000  # pictures read in this run, which other rows may show too

Advance = Callable[[int], None]
T = TypeVar("T")
R = TypeVar("R")
_Mark = tuple[bytes, int]  # name and stamp of a file


class Table(Protocol):
    """What a survey needs of a table of samples."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Sample: ...


@dataclass
class Chunk:
    """Some consecutive rows and what is known of their pictures.

    Attributes:
        first: number of the first row in the table.
        samples: the rows.
        sizes: (n, 1 + references + 1, 2) int32, upright (width, height) of target, references and mask; 0 for none.
        digests: (n, 1 + references + 1, 16) of the contents.
        reasons: why rows cannot be used, by their number in this chunk.
        missing: of which of them it is that a picture is not there.
        unread: (n,) whether a picture of the row would have to be read, with `read` off.
    """

    first: int
    samples: list[Sample]
    sizes: npt.NDArray[np.int32]
    digests: npt.NDArray[np.uint8]
    reasons: dict[int, str] = field(default_factory=dict)
    missing: set[int] = field(default_factory=set)
    unread: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(0, bool))


class Surveyor:
    """Looks at pictures. A context manager: leaving it ends its threads.

    Args:
        facts: what is known, and where what is found is noted.
        references: most reference pictures of a sample.
        read: whether pictures that are not known are read; if not, their rows count as `unread`.
    """

    def __init__(self, facts: Facts, *, references: int, read: bool = True, threads: int = _THREADS) -> None:
        self._facts, self._slots, self._read = facts, references + 2, read
        self._threads = threads
        self._explained = 0
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="survey")
        self._seen: OrderedDict[_Mark, np.void] = OrderedDict()

    def __enter__(self) -> Surveyor:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def chunks(self, table: Table, rows: range, advance: Advance = lambda rows: None) -> Iterator[Chunk]:
        """The rows of a range, chunk after chunk; `advance` is told how many rows were done."""
        for first in range(rows.start, rows.stop, CHUNK):
            yield self._look(first, [table[i] for i in range(first, min(first + CHUNK, rows.stop))])
            advance(min(CHUNK, rows.stop - first))

    def _look(self, first: int, samples: list[Sample]) -> Chunk:
        refs = [(row, slot, ref) for row, sample in enumerate(samples) for slot, ref in self._slots_of(sample)]
        stamped = self._in_threads(_stamp, [ref for _, _, ref in refs])
        names = np.frombuffer(b"".join(s.name for s in stamped), np.uint8).reshape(-1, 16)
        stamps = np.array([s.stamp for s in stamped], np.uint64)
        known, facts = self._facts.find(as_keys(names), stamps, rules=RULES_VERSION)

        chunk = Chunk(
            first,
            samples,
            np.zeros((len(samples), self._slots, 2), np.int32),
            np.zeros((len(samples), self._slots, 16), np.uint8),
            unread=np.zeros(len(samples), bool),
        )
        unknown: dict[_Mark, tuple[PictureFile, bool]] = {}
        for i, (row, slot, ref) in enumerate(refs):
            problem = stamped[i].problem
            if problem is not None:
                if row not in chunk.reasons:
                    chunk.reasons[row] = self._why(samples[row], slot, problem, stamped[i].missing)
                    if stamped[i].missing:
                        chunk.missing.add(row)
            elif not known[i] and (mark := (stamped[i].name, stamped[i].stamp)) not in self._seen:
                unknown[mark] = (ref, stamped[i].settled)
        failed = self._read_all(unknown) if self._read else {}
        rows = np.array([row for row, _, _ in refs])
        slots = np.array([slot for _, slot, _ in refs])
        for i in np.flatnonzero(~known).tolist():
            mark, at = (stamped[i].name, stamped[i].stamp), int(rows[i])
            if (found := self._seen.get(mark)) is not None:
                facts[i], known[i] = found, True
            elif mark in failed:
                chunk.reasons.setdefault(at, failed[mark])
            elif stamped[i].problem is None:
                chunk.unread[at] = True
        chunk.digests[rows[known], slots[known]] = facts["digest"][known]
        chunk.sizes[rows[known], slots[known], 0] = facts["width"][known]
        chunk.sizes[rows[known], slots[known], 1] = facts["height"][known]
        return chunk

    def _why(self, sample: Sample, slot: int, problem: str, missing: bool) -> str:
        """Of a missing picture also the nearest name, as long as that takes no longer than the rest."""
        if not missing or self._explained == _MOST_EXPLAINED:
            return problem
        self._explained += 1
        names = (sample.target_name, *sample.source_names)
        name = names[slot] if slot < len(names) else sample.mask_name or ""
        return f"picture {shown(name)} is not there: {sample.place.why_missing(name)}"

    def _slots_of(self, sample: Sample) -> Iterator[tuple[int, PictureFile]]:
        target, references, mask = pictures_of(sample)
        yield 0, target
        for i, reference in enumerate(references):
            yield 1 + i, reference
        if mask is not None:
            yield self._slots - 1, mask

    def _read_all(self, unknown: dict[_Mark, tuple[PictureFile, bool]]) -> dict[_Mark, str]:
        """Read pictures; remember and note what was found. Returns what is wrong with those that cannot be used."""
        failed: dict[_Mark, str] = {}
        noted = np.zeros(len(unknown), NAMED_FACT)
        count = 0
        looked = self._in_threads(_look_at, [ref for ref, _ in unknown.values()])
        for (mark, (_, settled)), found in zip(unknown.items(), looked, strict=True):
            if isinstance(found, str):
                failed[mark] = found
                continue
            digest, (width, height) = found
            record = np.zeros(1, FACT)
            record["stamp"], record["digest"] = mark[1], np.frombuffer(digest, np.uint8)
            record["width"], record["height"], record["rules"] = width, height, RULES_VERSION
            self._seen[mark] = record[0]
            if settled:
                noted[count]["name"], noted[count]["fact"] = np.frombuffer(mark[0], np.uint8), record[0]
                count += 1
        self._facts.note(noted[:count])
        while len(self._seen) > _REMEMBERED:
            self._seen.popitem(last=False)
        return failed

    def _in_threads(self, work: Callable[[T], R], items: Sequence[T]) -> list[R]:
        """The work on each item, in order; every thread takes its items in one piece, since most take microseconds."""
        if len(items) <= self._threads:
            return list(self._pool.map(work, items))
        pieces = [items[i :: self._threads] for i in range(self._threads)]
        done = list(self._pool.map(lambda piece: [work(item) for item in piece], pieces))
        return [done[i % self._threads][i // self._threads] for i in range(len(items))]


@dataclass(slots=True)
class _Stamped:
    name: bytes
    stamp: int = 0
    settled: bool = False
    problem: str | None = None
    missing: bool = False


def _stamp(ref: PictureFile) -> _Stamped:
    stamped = _Stamped(name_key(ref.location))
    try:
        stamp = ref.stamp()
        stamped.stamp, stamped.settled = stamp_hash(stamp), stamp.is_settled()
    except DataError as error:
        stamped.problem = str(error)
        stamped.missing = isinstance(error, NotThereError)
    return stamped


def _look_at(ref: PictureFile) -> tuple[bytes, tuple[int, int]] | str:
    try:
        return look_at(ref)
    except DataError as error:
        return str(error)
