"""How far the clocks of nodes are apart: all look at theirs at one moment, the end of a barrier."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from qwen_edit_zero.cluster.collectives import barrier, gather_numbers
from qwen_edit_zero.doctor.findings import Finding, Level
from qwen_edit_zero.doctor.nodes import listed

APART_SECONDS = 1.0
_ROUNDS = 3


def readings(device: torch.device, now: Callable[[], float] = time.time) -> list[list[float]]:
    """Every rank's clock (seconds) after each of a few barriers, by rank; collective."""
    mine = []
    for _ in range(_ROUNDS):
        barrier()
        mine.append(now())
    told: list[list[float]] = gather_numbers(torch.tensor(mine, dtype=torch.float64), device).tolist()
    return told


def offsets(read: Sequence[Sequence[float]]) -> list[float]:
    """By how many seconds each clock is ahead of most: the least seen, since a rank may leave a barrier late."""
    usual = [statistics.median(column) for column in zip(*read, strict=True)]
    return [min((t - u for t, u in zip(row, usual, strict=True)), key=abs) for row in read]


def judge(ahead: Mapping[str, float]) -> Finding:
    """Whether clocks agree to a second; `ahead` by node."""
    wrong = {name: seconds for name, seconds in ahead.items() if abs(seconds) > APART_SECONDS}
    if not wrong:
        most = max(abs(seconds) for seconds in ahead.values())
        return Finding("machines", "clocks", Level.OK, f"{most:.2f} s apart at most" if len(ahead) > 1 else "one clock")
    worst = max(wrong, key=lambda name: abs(wrong[name]))
    way = "ahead of" if wrong[worst] > 0 else "behind"
    text = f"{abs(wrong[worst]):.1f} s {way} the others on {listed(list(wrong))}"
    return Finding("machines", "clocks", Level.WARNING, text, "let them follow a time server (chrony, NTP)")
