"""Rows that are left out: counted, the first ones told, all of them in a file, whatever their number."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from qwen_edit_zero.edit_data.cache.columns import Columns, wait_for
from qwen_edit_zero.edit_data.manifests.samples import Refusal

MOST_TOLD = 10


@dataclass(frozen=True)
class Refused:
    """Rows of a table that are left out.

    Attributes:
        count: how many.
        first: the first of them, ten at most.
        files: all, a JSON object a line: line, id, reason; each in the order of rows.
    """

    count: int
    first: tuple[Refusal, ...]
    files: tuple[Path, ...] = ()

    def and_also(self, other: Refused) -> Refused:
        """Both together."""
        first = (*self.first, *other.first)[:MOST_TOLD]
        return Refused(self.count + other.count, first, (*self.files, *other.files))


class RefusalLog:
    """Collects this rank's refusals, then everyone's.

    Args:
        name: unique in the columns' folder.
    """

    def __init__(self, columns: Columns, name: str) -> None:
        self._columns, self._name = columns, name
        self._first: list[Refusal] = []
        self._file: TextIO | None = None
        self.count = 0

    def add(self, refusal: Refusal) -> None:
        """Note one more row of this rank's part, in the order of rows."""
        self.count += 1
        if len(self._first) < MOST_TOLD:
            self._first.append(refusal)
        if self._file is None:
            self._file = self._path(self._columns.ranks.rank).open("w", encoding="utf-8")
        self._file.write(json.dumps(as_line(refusal), ensure_ascii=False) + "\n")

    def close(self) -> Refused:
        """Those of all ranks, the same on every rank. Collective."""
        if self._file is not None:
            self._file.close()
        ranks = self._columns.ranks
        parts: list[tuple[int, list[Refusal]]] = ranks.exchange((self.count, self._first))
        count = sum(number for number, _ in parts)
        joined: Path | None = None
        if count:
            joined = self._columns.folder / f"{self._name}.jsonl"
            if ranks.first:
                with joined.open("wb") as out:
                    for rank, (number, _) in enumerate(parts):
                        if number:
                            wait_for(self._path(rank))
                            out.write(self._path(rank).read_bytes())
        first = [refusal for _, mine in parts for refusal in mine]
        return Refused(count, tuple(first[:MOST_TOLD]), () if joined is None else (joined,))

    def _path(self, rank: int) -> Path:
        return self._columns.folder / f"{self._name}.{rank:05d}.jsonl"


def as_line(refusal: Refusal) -> dict[str, object]:
    """What files about rows that are left out hold of each."""
    where = {} if refusal.where is None else {"where": refusal.where}
    return {"line": refusal.line, **where, "id": refusal.id, "reason": refusal.reason}


def listed(count: int, first: Sequence[Refusal]) -> str:
    """`N rows cannot be used` and the first of them, a line each."""
    lines = [f"{count:,} row{'s' if count > 1 else ''} cannot be used"]
    lines += [f"  {refusal}" for refusal in first[:MOST_TOLD]]
    if count > MOST_TOLD:
        lines.append(f"  and {count - MOST_TOLD:,} more")
    return "\n".join(lines)
