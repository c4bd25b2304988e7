"""What is shown of an examination, on the terminal and as JSON."""

from __future__ import annotations

import json
import os
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qwen_edit_zero.doctor.findings import Finding, Level, worst
from qwen_edit_zero.doctor.links import Measured
from qwen_edit_zero.doctor.nodes import Node, listed
from qwen_edit_zero.errors import SettingsError

GROUPS = ("software", "data", "folders", "machines", "network", "speed")
_NAME, _WIDTH = 18, 120


@dataclass(frozen=True)
class Report:
    """All that was found."""

    nodes: Sequence[Node]
    launcher: str
    seconds: float
    findings: Sequence[Finding]
    measured: Measured

    @property
    def exit_status(self) -> int:
        """2 if something must be mended before training, else 0."""
        return 2 if worst(self.findings) is Level.FAILURE else 0

    def text(self, width: int | None = None) -> str:
        """For people: what is well by group, then what is not, worst last, then a line that sums it up."""
        wide = max(60, min(width or shutil.get_terminal_size((_WIDTH, 24)).columns, _WIDTH))
        ranks = sum(len(node.ranks) for node in self.nodes)
        names = listed([node.name for node in self.nodes])
        nodes = f"node{'s' if len(self.nodes) > 1 else ''} ({names})"
        started = "by itself" if self.launcher == "single" else f"started by {self.launcher}"
        lines = [f"doctor: {_many(ranks, 'rank')} on {len(self.nodes)} {nodes}, {started}"]
        for group in GROUPS:
            shown = [f for f in self.findings if f.group == group and f.level in (Level.OK, Level.UNCHECKED)]
            if shown:
                lines += ["", group]
            for finding in shown:
                mark = "" if finding.level is Level.OK else "not checked: "
                lines += _entry(f"  {finding.name:<{_NAME}}", f"{mark}{finding.text}", wide)
        for level in (Level.WARNING, Level.FAILURE):
            for finding in self.findings:
                if finding.level is level:
                    lines += [
                        "",
                        *_entry(f"{level.upper()}  ", f"{finding.group}, {finding.name}: {finding.text}", wide),
                    ]
                    if finding.advice:
                        lines += _entry("    -> ", finding.advice, wide)
        return "\n".join([*lines, "", self.summary()])

    def summary(self) -> str:
        """One line: how many of each level."""
        counts = {level: sum(finding.level is level for finding in self.findings) for level in Level}
        said = f"{counts[Level.OK]} well, {_many(counts[Level.WARNING], 'warning')}, "
        said += f"{_many(counts[Level.FAILURE], 'failure')}, {counts[Level.UNCHECKED]} not checked"
        verdict = "mend the failures before training" if self.exit_status else "ready to train"
        return f"{verdict}: {said}; {self.seconds:.0f} s"

    def as_json(self) -> dict[str, Any]:
        """For programs: the same, and every measurement (seconds, bytes a second)."""
        names = [node.name for node in self.nodes]
        measured = self.measured
        return {
            "status": str(worst(self.findings)),
            "exit_status": self.exit_status,
            "launcher": self.launcher,
            "seconds": round(self.seconds, 3),
            "nodes": [{"name": node.name, "ranks": list(node.ranks)} for node in self.nodes],
            "findings": [asdict(finding) for finding in self.findings],
            "all_reduce": asdict(measured.reduce) if measured.reduce else None,
            "all_gather": asdict(measured.gather) if measured.gather else None,
            "within_nodes": {names[n]: asdict(speed) for n, speed in measured.within.items()},
            "pairs": [{"a": names[a], "b": names[b], **asdict(speed)} for (a, b), speed in measured.pairs.items()],
        }


def write_json(report: Report, path: Path) -> None:
    """Write it whole, or not at all. Raises SettingsError if that is impossible."""
    temporary = path.with_name(f".{path.name}.partial")
    try:
        temporary.write_text(json.dumps(report.as_json(), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise SettingsError(f"--json {path} cannot be written: {error.strerror or error}") from None


def _entry(start: str, text: str, width: int) -> list[str]:
    return textwrap.wrap(
        " ".join(text.split()), width, initial_indent=start, subsequent_indent=" " * len(start), break_long_words=False,
        break_on_hyphens=False,
    ) or [start.rstrip()]  # fmt: skip


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
