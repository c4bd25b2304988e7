"""Writing checked rows to a part of an index: records one after another, and a column of each small value.

One process writes a part; a large manifest is cut into several, which `index.assemble` puts together.
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson
import xxhash

from qwen_edit_zero.edit_data.manifests.rows import Row
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError

RECORDS, REFUSED, SUMMARY = "rows.bin", "refused.jsonl", "part.json"
COLUMNS = {  # name: type code of `array`, which is numpy's too
    "length": "I",  # bytes of the record
    "line": "q",  # in the part; see `PartSummary.lines`
    "hash": "Q",  # of the id
    "category": "i",  # index into the part's categories
    "weight": "f",
    "split": "i",
}
MOST_CATEGORIES = 10_000
MOST_SPLITS = 1_000
_MOST_REASONS = 50
_CHUNK = 1 << 14


@dataclass
class PartSummary:
    """What is known of a part besides its columns.

    Attributes:
        rows: accepted ones.
        lines: lines (rows, pictures ...) that the part takes up, whether used or not.
        refused: rows refused.
        reasons: how many were refused for what, without names and numbers.
        categories, splits: in order of their first row; "" stands for none.
        notes: what the reader has to tell about the whole, such as columns that are not used.
        places: name and first line of each file, where the lines of several are counted through.
    """

    rows: int = 0
    lines: int = 0
    refused: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    categories: list[str] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    places: list[tuple[str, int]] = field(default_factory=list)


class PartWriter:
    """Writes rows to a new part in `folder` as they come; memory does not grow with their number."""

    def __init__(self, folder: Path, *, location: str) -> None:
        folder.mkdir(parents=True)
        self._folder, self._location = folder, location
        self._files: dict[str, BinaryIO] = {
            name: (folder / name).open("wb") for name in (RECORDS, REFUSED, *(f"{c}.bin" for c in COLUMNS))
        }
        self._records: list[bytes] = []
        self._columns: dict[str, array[Any]] = {name: array(code) for name, code in COLUMNS.items()}
        self._categories: dict[str, int] = {}
        self._splits: dict[str, int] = {}
        self._reasons: Counter[str] = Counter()
        self.summary = PartSummary()

    def add(self, line: int, row: Row) -> None:
        """Append an accepted row. Raises DataError if the manifest has absurdly many categories or splits."""
        id_ = row[0]
        if id_ is None:
            id_ = content_id(row)
            row = row._replace(id=id_)
        record = orjson.dumps((*row,))
        columns = self._columns
        self._records.append(record)
        columns["length"].append(len(record))
        columns["line"].append(line)
        columns["hash"].append(xxhash.xxh3_64_intdigest(id_.encode()))
        columns["weight"].append(row[5])
        columns["category"].append(self._code(self._categories, row[4] or "", "category", MOST_CATEGORIES))
        columns["split"].append(self._code(self._splits, row[6] or "", "split", MOST_SPLITS))
        if len(self._records) >= _CHUNK:
            self._flush()

    def refuse(self, line: int, id_: str | None, reason: str) -> None:
        """Append a row that is left out."""
        self._files[REFUSED].write(orjson.dumps([line, id_, reason]) + b"\n")
        self.summary.refused += 1
        kind = reason_kind(reason)
        self._reasons[kind if kind in self._reasons or len(self._reasons) < _MOST_REASONS else "other"] += 1

    def close(self, *, lines: int, notes: list[str], places: list[tuple[str, int]]) -> None:
        """Finish the part; see `PartSummary` for what is given."""
        self._flush()
        for file in self._files.values():
            file.close()
        summary = self.summary
        summary.lines, summary.notes, summary.places = lines, notes, places
        summary.reasons, summary.categories = dict(self._reasons), list(self._categories)
        summary.splits = list(self._splits)
        (self._folder / SUMMARY).write_text(json.dumps(asdict(summary)), encoding="utf-8")

    def _code(self, codes: dict[str, int], value: str, key: str, most: int) -> int:
        code = codes.get(value)
        if code is None:
            if len(codes) >= most:
                raise too_many(key, most, self._location)
            code = codes[value] = len(codes)
        return code

    def _flush(self) -> None:
        self._files[RECORDS].write(b"".join(self._records))
        self.summary.rows += len(self._records)
        self._records.clear()
        for name, column in self._columns.items():
            column.tofile(self._files[f"{name}.bin"])
            del column[:]


def read_summary(folder: Path) -> PartSummary:
    """The summary of a finished part."""
    values: dict[str, Any] = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    values["places"] = [(name, first) for name, first in values["places"]]
    return PartSummary(**values)


def content_id(row: Row) -> str:
    """Id of a row without one: from its content, so that moving or adding rows changes no other sample's noise."""
    content: list[Any] = [row.sources, row.instruction, row.target, *([row.mask] if row.mask else [])]
    return "row-" + hashlib.blake2b(json.dumps(content).encode(), digest_size=8).hexdigest()


def reason_kind(reason: str) -> str:
    """A reason without the names and numbers in it, for counting."""
    return re.sub(r"\d[\d,]*", "N", re.sub(r'"(?:[^"\\]|\\.)*"', "...", reason))[:200]


def too_many(key: str, most: int, location: str) -> DataError:
    """The error of a manifest in which a key that groups samples has another value for almost each."""
    return DataError(
        f'manifest {shown(location)}: over {most:,} different values of "{key}"; it names a group of samples, not one'
    )
