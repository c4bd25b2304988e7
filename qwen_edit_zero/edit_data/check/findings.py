"""Findings: one about a row each; counted, the first of a kind kept, those that matter written to a file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import orjson

from qwen_edit_zero.edit_data.check.kinds import KINDS, ORDER, Kind
from qwen_edit_zero.edit_data.manifests.index_part import reason_kind
from qwen_edit_zero.edit_data.manifests.samples import Sample

EXAMPLES = 8  # findings of a kind that reports show
_MOST_REASONS = 200  # different reasons counted


@dataclass(frozen=True, slots=True)
class Finding:
    """Something about a row.

    Attributes:
        kind: a name of `KINDS`.
        row: index in the table; -1 of a row that is not in it.
        where: such as "line 7".
        text: what was found, in words.
    """

    kind: str
    row: int
    line: int
    where: str
    id: str | None
    text: str

    @property
    def level(self) -> str:
        """Of its kind."""
        return KINDS[self.kind].level


@dataclass
class Found:
    """All findings of one kind, in brief."""

    kind: Kind
    count: int = 0
    examples: list[Finding] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)  # of refused rows: without names and numbers


class FindingLog:
    """Takes findings in, in the order of rows; notes are counted and not written, since whole sets may be noted.

    A context manager. Args: `path` of the file, a JSON object a line. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.by_kind: dict[str, Found] = {}
        self._file: BinaryIO = path.open("wb")

    def __enter__(self) -> FindingLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def add(self, findings: Iterable[Finding]) -> None:
        """Take in more. Raises OSError."""
        lines = []
        for finding in findings:
            kind = KINDS[finding.kind]
            found = self.by_kind.setdefault(kind.name, Found(kind))
            found.count += 1
            if len(found.examples) < EXAMPLES:
                found.examples.append(finding)
            if kind.level == "refused":
                reason = reason_kind(finding.text)
                known = reason in found.reasons or len(found.reasons) < _MOST_REASONS
                found.reasons[reason if known else "other reasons"] += 1
            if kind.level != "note":
                lines.append(_line(finding))
        self._file.write(b"".join(lines))

    def note(self, kind: str, count: int, examples: Iterable[Finding]) -> None:
        """Take in a kind of notes that were counted elsewhere."""
        if count:
            self.by_kind[kind] = Found(KINDS[kind], count, list(examples)[:EXAMPLES])

    def ordered(self) -> list[Found]:
        """Worst kinds first."""
        return [self.by_kind[name] for name in sorted(self.by_kind, key=ORDER.__getitem__)]

    def count(self, level: str) -> int:
        """Findings of a level; a row may have several."""
        return sum(found.count for found in self.by_kind.values() if found.kind.level == level)


def about(kind: str, row: int, sample: Sample, where: str, text: str) -> Finding:
    """A finding about a sample of the table."""
    return Finding(kind, row, sample.line, where, sample.id, text)


def _line(finding: Finding) -> bytes:
    values = {
        "level": finding.level,
        "kind": finding.kind,
        "line": finding.line,
        "where": finding.where,
        "id": finding.id,
        "reason": finding.text,
    }
    return orjson.dumps(values) + b"\n"
