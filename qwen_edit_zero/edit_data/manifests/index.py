"""The index of a manifest: its checked rows on disk, memory-mapped by every rank; made once, put in place atomically.

INDEX/header.json     counts, categories, splits, fingerprint, sizes of the files
INDEX/rows-000.bin    records, one after another: JSON arrays in the order of the fields of `rows.Row`
INDEX/COLUMN.bin      start (uint64), length (uint32), line (int64), category (int32), weight (float32),
                      split (int32): one value a row
INDEX/refused.jsonl   rows left out: [line, id, reason]; refused.bin: where each begins (uint64)
"""

from __future__ import annotations

import heapq
import json
import mmap
import os
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
import xxhash

from qwen_edit_zero.edit_data.manifests.duplicates import duplicates
from qwen_edit_zero.edit_data.manifests.index_part import (
    MOST_CATEGORIES,
    MOST_SPLITS,
    RECORDS,
    REFUSED,
    content_id,
    read_summary,
    reason_kind,
    too_many,
)
from qwen_edit_zero.edit_data.manifests.rows import Row
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError

VERSION = 2  # of records and of what readers make of the same bytes
HEADER = "header.json"
_DTYPES = {"start": "<u8", "length": "<u4", "line": "<i8", "category": "<i4", "weight": "<f4", "split": "<i4"}
_CHUNK = 1 << 20


@dataclass
class Header:
    """What an index knows of its manifest as a whole.

    Attributes:
        location: where the manifest was when the index was made, for people.
        title: the kind of manifest, such as "DiffSynth metadata.csv".
        unit: what its rows are numbered by: "line", "row", "picture".
        rows, refused: how many.
        reasons: number of refused rows a kind of reason.
        fingerprint: 32 hex digits over the accepted rows in order; not over where they lie or what format they had.
        categories, splits: what the codes of the columns stand for; "" for none.
        category_counts, split_counts: rows of each.
        notes: what should be told besides, such as columns that are not used.
        places: name and first line of each file, where the lines of several are counted through.
        files: size of each file in bytes.
    """

    location: str
    title: str
    unit: str
    rows: int = 0
    refused: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    fingerprint: str = ""
    categories: list[str] = field(default_factory=list)
    category_counts: list[int] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    split_counts: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    places: list[tuple[str, int]] = field(default_factory=list)
    files: dict[str, int] = field(default_factory=dict)

    def where(self, line: int) -> str:
        """`line 7`, or `row 3 of "part-1.parquet"` where the manifest has several files."""
        if not self.places:
            return f"{self.unit} {line}"
        name, first = self.places[bisect_right(self.places, line, key=lambda place: place[1]) - 1]
        return f"{self.unit} {line - first + 1} of {shown(name)}"


class Index:
    """An index on disk, opened. May be shared by threads and by forked processes; pickled by its folder.

    Raises DataError if a file is missing or has another size than the header says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            values = json.loads((folder / HEADER).read_text(encoding="utf-8"))
            values["places"] = [(name, first) for name, first in values["places"]]
            self.header = Header(**values)
            for name, size in self.header.files.items():
                if (folder / name).stat().st_size != size:
                    raise DataError(f"index {shown(folder)}: {name} is not as long as it was; delete that folder")
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"index {shown(folder)}: it cannot be read ({error}); delete that folder") from error
        self.columns: dict[str, npt.NDArray[Any]] = {
            name: self._map(f"{name}.bin", dtype) for name, dtype in _DTYPES.items()
        }
        names = sorted(name for name in self.header.files if name.startswith("rows-"))
        sizes = [self.header.files[name] for name in names]
        self._bases = [sum(sizes[:i]) for i in range(len(sizes))]
        self._records = [_mapped(folder / name) for name in names]
        self._refused = _mapped(folder / REFUSED)
        self._refused_starts = self._map("refused.bin", "<u8")

    def __reduce__(self) -> tuple[type[Index], tuple[Path]]:
        return Index, (self.folder,)

    def check(self) -> None:
        """Raise DataError if columns are not what was written, as far as a quick look tells."""
        wanted = {"category": self.header.category_counts, "split": self.header.split_counts}
        counts = {name: np.zeros(len(of), np.int64) for name, of in wanted.items()}
        size, sound = sum(map(len, self._records)), True
        for at in range(0, self.header.rows, _CHUNK):
            chunk = {name: column[at : at + _CHUNK] for name, column in self.columns.items()}
            sound = sound and bool((chunk["weight"] > 0).all() and np.isfinite(chunk["weight"]).all())
            length = chunk["length"].astype(np.uint64)
            sound = sound and bool((length <= size).all() and (chunk["start"] <= np.uint64(size) - length).all())
            for name, count in counts.items():
                sound = sound and chunk[name].min() >= 0 and chunk[name].max() < len(count)
                if sound:
                    count += np.bincount(chunk[name], minlength=len(count))
        if not sound or any(counts[name].tolist() != of for name, of in wanted.items()):
            raise DataError(f"index {shown(self.folder)}: its columns are damaged; delete that folder")

    def row(self, number: int) -> Row:
        """The row at an index from 0."""
        start, length = int(self.columns["start"][number]), int(self.columns["length"][number])
        part = bisect_right(self._bases, start) - 1
        offset = start - self._bases[part]
        try:
            return _row(self._records[part][offset : offset + length])
        except ValueError as error:
            raise DataError(f"index {shown(self.folder)}: row {number} is damaged; delete that folder") from error

    def refusal(self, number: int) -> tuple[int, str | None, str]:
        """(line, id, reason) of a refused row, in the order of their lines."""
        start = int(self._refused_starts[number])
        end = self._refused.find(b"\n", start)
        line, id_, reason = orjson.loads(self._refused[start:end])
        return line, id_, reason

    def _map(self, name: str, dtype: str) -> npt.NDArray[Any]:
        if self.header.files[name] == 0:
            return np.empty(0, dtype)
        return np.asarray(np.memmap(self.folder / name, dtype, mode="r"))  # plain: the subclass is slow to look up in


def assemble(parts: Sequence[Path], out: Path, header: Header) -> None:
    """Make an index in `out`, which exists and is empty, of the parts of a manifest in order; the parts are used up.

    Rows with an id that an earlier row has are refused here, so that the parts need not know of each other.
    """
    summaries = [read_summary(part) for part in parts]
    first_lines, lines = [], 0
    for summary in summaries:
        first_lines.append(lines)
        lines += summary.lines
    header.categories = list(dict.fromkeys(name for summary in summaries for name in summary.categories))
    header.splits = list(dict.fromkeys(name for summary in summaries for name in summary.splits))
    for key, values, most in (("category", header.categories, MOST_CATEGORIES), ("split", header.splits, MOST_SPLITS)):
        if len(values) > most:
            raise too_many(key, most, header.location)
    header.notes = list(dict.fromkeys([*header.notes, *(note for summary in summaries for note in summary.notes)]))
    header.places = [(n, first + at) for s, at in zip(summaries, first_lines, strict=True) for n, first in s.places]
    reasons = Counter[str]()
    for summary in summaries:
        reasons.update(summary.reasons)

    _join_columns(parts, out, first_lines, summaries, header)
    digest = xxhash.xxh3_128()
    records = []
    for number, part in enumerate(parts):
        path = out / f"rows-{number:03d}.bin"
        os.rename(part / RECORDS, path)
        with path.open("rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
        records.append(path)

    again = _refuse_duplicates(out, records, header, digest)
    header.reasons = dict((reasons + again).most_common())
    header.refused = sum(summary.refused for summary in summaries) + again.total()
    header.fingerprint = digest.hexdigest()
    category, split = _column(out, "category"), _column(out, "split")
    header.category_counts = np.bincount(category, minlength=len(header.categories)).tolist()
    header.split_counts = np.bincount(split, minlength=len(header.splits)).tolist()
    header.rows = len(category)
    _join_refused(parts, first_lines, out)
    header.files = {path.name: path.stat().st_size for path in out.iterdir() if path.is_file()}
    (out / HEADER).write_text(json.dumps(asdict(header), ensure_ascii=False, indent=1), encoding="utf-8")
    for path in out.iterdir():
        _sync(path)


def _join_columns(
    parts: Sequence[Path], out: Path, first_lines: Sequence[int], summaries: Sequence[Any], header: Header
) -> None:
    files = {name: (out / f"{name}.bin").open("wb") for name in (*_DTYPES, "hash")}
    category_of = {name: code for code, name in enumerate(header.categories)}
    split_of = {name: code for code, name in enumerate(header.splits)}
    start = 0
    for part, first_line, summary in zip(parts, first_lines, summaries, strict=True):
        categories = np.array([category_of[name] for name in summary.categories], "<i4")
        splits = np.array([split_of[name] for name in summary.splits], "<i4")
        columns = {name: _column(part, name) for name in files if name != "start"}
        for at in range(0, summary.rows, _CHUNK):
            chunk = {name: column[at : at + _CHUNK] for name, column in columns.items()}
            ends = np.cumsum(chunk["length"], dtype="<u8") + np.uint64(start)
            (ends - chunk["length"]).astype("<u8").tofile(files["start"])
            start = int(ends[-1])
            (chunk["line"] + first_line).tofile(files["line"])
            categories[chunk["category"]].tofile(files["category"])
            splits[chunk["split"]].tofile(files["split"])
            for name in ("length", "weight", "hash"):
                chunk[name].tofile(files[name])
    for file in files.values():
        file.close()


def _refuse_duplicates(out: Path, records: Sequence[Path], header: Header, digest: Any) -> Counter[str]:
    """Take rows out that have an earlier row's id; their refusals go to `out/again.jsonl`, their number is returned."""
    maps = [_mapped(path) for path in records]
    bases = np.cumsum([0, *(len(m) for m in maps[:-1])])
    start, length, line = _column(out, "start"), _column(out, "length"), _column(out, "line")

    def row_at(number: int) -> Row:
        part = int(np.searchsorted(bases, start[number], side="right")) - 1
        offset = int(start[number]) - int(bases[part])
        return _row(maps[part][offset : offset + int(length[number])])

    pairs = array("q")
    for pair in duplicates(_column(out, "hash"), lambda number: str(row_at(number).id)):
        pairs.extend(pair)
    found = np.frombuffer(pairs, "<i8").reshape(-1, 2)
    (out / "hash.bin").unlink()
    reasons: Counter[str] = Counter()
    with (out / "again.jsonl").open("wb") as file:
        for row, first in found[np.argsort(found[:, 0])].tolist():
            values, first_line = row_at(row), int(line[first])
            id_ = str(values.id)
            if id_ == content_id(values):
                reason = (
                    f"it has the pictures and the instruction of {header.where(first_line)}; delete one of them, or "
                    "give both an id"
                )
            else:
                reason = f"its id {shown(id_)} is that of {header.where(first_line)} too; ids must be unique"
            reasons[reason_kind(reason)] += 1
            file.write(orjson.dumps([int(line[row]), id_, reason]) + b"\n")
            digest.update(row.to_bytes(8, "little"))
    if len(found):
        keep = np.ones(len(line), np.bool_)
        keep[found[:, 0]] = False
        for name in _DTYPES:
            column = _column(out, name)
            with (out / f"{name}.new").open("wb") as new:
                for at in range(0, len(column), _CHUNK):
                    column[at : at + _CHUNK][keep[at : at + _CHUNK]].tofile(new)
            os.replace(out / f"{name}.new", out / f"{name}.bin")
    return reasons


def _join_refused(parts: Sequence[Path], first_lines: Sequence[int], out: Path) -> None:
    def from_parts() -> Iterator[list[Any]]:
        for part, first_line in zip(parts, first_lines, strict=True):
            with (part / REFUSED).open("rb") as file:
                for raw in file:
                    line, id_, reason = orjson.loads(raw)
                    yield [line + first_line, id_, reason]

    def from_duplicates() -> Iterator[list[Any]]:
        with (out / "again.jsonl").open("rb") as file:
            for raw in file:
                yield orjson.loads(raw)

    position = 0
    with (out / REFUSED).open("wb") as file, (out / "refused.bin").open("wb") as starts:
        for values in heapq.merge(from_parts(), from_duplicates(), key=lambda refusal: refusal[0]):
            raw = orjson.dumps(values) + b"\n"
            starts.write(position.to_bytes(8, "little"))
            file.write(raw)
            position += len(raw)
    (out / "again.jsonl").unlink()


def _column(folder: Path, name: str) -> npt.NDArray[Any]:
    path, dtype = folder / f"{name}.bin", _DTYPES.get(name, "<u8")
    return np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)


def _mapped(path: Path) -> mmap.mmap | bytes:
    with path.open("rb") as file:
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if path.stat().st_size else b""


def _row(record: bytes) -> Row:
    id_, sources, instruction, target, category, weight, split, mask, paraphrases = orjson.loads(record)
    return Row(id_, tuple(sources), instruction, target, category, weight, split, mask, tuple(paraphrases))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
