"""Results as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Table:
    """A benchmark's result."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]
    notes: str = ""

    def markdown(self) -> str:
        """The table under its title, with the notes below."""
        lines = [f"### {self.title}", "", _line(self.columns), "|" + "---|" * len(self.columns)]
        lines += [_line([_text(cell) for cell in row]) for row in self.rows]
        return "\n".join([*lines, "", self.notes, ""] if self.notes else [*lines, ""])


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _text(cell: object) -> str:
    if isinstance(cell, float):
        return f"{cell:,.0f}"
    return f"{cell:,}" if isinstance(cell, int) else str(cell)
