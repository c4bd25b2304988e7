"""What the doctor says: one line a thing that was looked at."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Level(StrEnum):
    """How bad it is; FAILURE must be mended before training."""

    OK = "ok"
    WARNING = "warning"
    FAILURE = "failure"
    UNCHECKED = "not checked"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        group: software, data, folders, machines, network or speed: under which heading it is shown.
        name: what was looked at, in a word or two.
        text: what was found, on which nodes.
        advice: what to do; empty if nothing.
    """

    group: str
    name: str
    level: Level
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.text}" + (f"; {self.advice}" if self.advice else "")


def worst(findings: Iterable[Finding]) -> Level:
    """FAILURE, WARNING or OK."""
    levels = {finding.level for finding in findings}
    return next((level for level in (Level.FAILURE, Level.WARNING) if level in levels), Level.OK)


def failures(findings: Iterable[Finding]) -> list[Finding]:
    """Those that must be mended."""
    return [finding for finding in findings if finding.level is Level.FAILURE]
