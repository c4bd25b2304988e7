"""What rules did to a text, so that it can be shown and undone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Change:
    """One application of a rule: at `start` (a character of the text at that time) `before` became `after`."""

    rule: str
    start: int
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.before!r} -> {self.after!r}"


def difference(rule: str, old: str, new: str) -> Change:
    """The change from `old` to `new`, without what both begin and end with."""
    start, limit = 0, min(len(old), len(new))
    while start < limit and old[start] == new[start]:
        start += 1
    end = 0
    while end < limit - start and old[-1 - end] == new[-1 - end]:
        end += 1
    return Change(rule, start, old[start : len(old) - end], new[start : len(new) - end])


def undo(text: str, changes: Sequence[Change]) -> str:
    """The text before `changes`, which are in the order they were made."""
    for change in reversed(changes):
        end = change.start + len(change.after)
        if text[change.start : end] != change.after:
            raise ValueError(f"this text did not come from these changes: no {change.after!r} at {change.start}")
        text = text[: change.start] + change.before + text[end:]
    return text
