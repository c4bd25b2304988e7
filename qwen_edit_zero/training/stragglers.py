"""Which rank is persistently slower than the others, and at what.

In a step all ranks wait for each other inside collectives, so that all steps take equally long; what tells ranks apart
is measured apart: how long a rank waits for data, how fast its device does a fixed piece of work without any other
rank, and how long it waits for the others at the end of a step (the slow one waits least).
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from qwen_edit_zero.cluster.collectives import gather_numbers, gather_objects
from qwen_edit_zero.training.metrics import StepMetrics

PERSISTENT = 3  # times in a row
_SLOWER = 1.4  # times the median device
_DATA_SHARE = 0.1  # of the steps' time, lost by one rank's data, is worth telling
_SIZE = {"cuda": 4096, "cpu": 192}  # of the matrices that are multiplied
_REPEATS = 3


@dataclass
class LastStep:
    """This rank's own share of the last step; filled in by the trainer.

    Attributes:
        data_seconds: it waited for its batches.
        wait_seconds: it waited for the others when losses were summed.
        batch: its last micro-batch.
    """

    data_seconds: float = 0.0
    wait_seconds: float = 0.0
    batch: Any = field(default=None, repr=False)


class DeviceProbe:
    """A fixed piece of work on this rank's device."""

    def __init__(self, device: torch.device) -> None:
        size = _SIZE.get(device.type, 192)
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._device = device
        self._matrix = torch.full((size, size), 1 / size, dtype=dtype, device=device)

    def seconds(self) -> float:
        """Time of the fastest of a few tries; the device is waited for."""
        tries = []
        for _ in range(_REPEATS):
            self._wait()
            began = time.perf_counter()
            self._matrix @ self._matrix
            self._wait()
            tries.append(time.perf_counter() - began)
        return min(tries)

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class StragglerHook:
    """Every `every` steps gathers three numbers of each rank; names a rank that is slow `PERSISTENT` times in a row.

    `slow` is told on rank 0: the rank, and in words how it is slow; once until it has been as fast as the others again.
    A hook of the trainer, on every rank.
    """

    def __init__(
        self, last: LastStep, device: torch.device, every: int, slow: Callable[[int, str], None], rank: int
    ) -> None:
        self._last, self._device, self._every, self._slow, self._rank = last, device, every, slow, rank
        self._probe = DeviceProbe(device)
        self._hosts: list[str] | None = None
        self._data, self._wait, self._total = 0.0, 0.0, 0.0
        self._judge = Persistence()

    def after_step(self, metrics: StepMetrics, *, is_last: bool) -> None:
        """Collective in every `every`-th step."""
        self._data += self._last.data_seconds
        self._wait += self._last.wait_seconds
        self._total += metrics.step_seconds
        if metrics.step % self._every:
            return
        if self._hosts is None:
            self._hosts = gather_objects(socket.gethostname())
        mine = [self._data, self._probe.seconds(), self._wait, self._total]
        everyone = gather_numbers(torch.tensor(mine, dtype=torch.float64), self._device).tolist()
        self._data, self._wait, self._total = 0.0, 0.0, 0.0
        for rank, how in self._judge.of(slow_ranks(everyone)):
            if self._rank == 0:
                self._slow(rank, f"rank {rank} ({self._hosts[rank]}) is persistently slower than the others: {how}")


class Persistence:
    """Tells of what has been so for `PERSISTENT` times in a row, once."""

    def __init__(self) -> None:
        self._streaks: dict[int, int] = {}

    def of(self, found: dict[int, str]) -> list[tuple[int, str]]:
        """What to tell, given the ranks that are slow this time, and how."""
        self._streaks = {rank: self._streaks.get(rank, 0) + 1 for rank in found}
        return [(rank, how) for rank, how in found.items() if self._streaks[rank] == PERSISTENT]


def slow_ranks(everyone: Sequence[Sequence[float]]) -> dict[int, str]:
    """Ranks slower than the others, and how; each rank gives seconds of data, probe, waiting and all of its steps."""
    if len(everyone) < 2:
        return {}
    usual = [statistics.median(values) for values in zip(*everyone, strict=True)]
    found: dict[int, str] = {}
    for rank, (data, probe, wait, total) in enumerate(everyone):
        how = []
        if probe > _SLOWER * usual[1]:
            how.append(f"its device takes {probe / usual[1]:.1f} times as long for the same work")
        if data - usual[0] > _DATA_SHARE * total:
            how.append(f"it waits for data {data / total:.0%} of the time, the others {usual[0] / total:.0%}")
        if how:
            found[rank] = f"{'; '.join(how)} (it waits for the others {wait / total:.0%} of the time)"
    return found
