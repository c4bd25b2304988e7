"""The checks that GPUs have to pass, in this process, as a table."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tests.gpu.checks import Finding, all_checks


@dataclass(frozen=True)
class Outcome:
    """A check's findings, or the error that ended it.

    Attributes:
        error: first line of the exception; empty if there was none.
    """

    check: str
    findings: tuple[Finding, ...]
    error: str
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether all of it holds."""
        return not self.error and all(finding.holds for finding in self.findings)


def run_checks(device: torch.device, names: Sequence[str], *, allows: Callable[[str], bool]) -> list[Outcome]:
    """Run the checks of these names, as far as `allows` lets them start."""
    outcomes = []
    checks = all_checks()
    for name in names:
        check = checks[name]
        if not allows(f"contract: {name}"):
            continue
        began = time.monotonic()
        findings: list[Finding] = []
        error = ""
        try:
            findings = check(device)
        except Exception as caught:  # the table must show the others too
            error = f"{type(caught).__name__}: {(str(caught).strip().splitlines() or ['no message'])[0]}"
        outcomes.append(Outcome(name, tuple(findings), error, time.monotonic() - began))
    return outcomes
