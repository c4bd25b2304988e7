"""Signs of life: where each rank is, told through the job's store, and which ranks have fallen silent.

Every rank writes its `Position` once in `BEAT_SECONDS`. Two ranks look at all of them, the first and the last, so that
each rank has somebody on another node to miss it: by one request for all keys. A rank whose own store does not answer
misses whoever serves it. Silence is counted in looks, not in hours of the clock: a job that was stopped as a whole
(`scontrol suspend`, a lid closed) finds nobody silent when it goes on.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

BEAT_SECONDS = 1.0
SETUP_SECONDS = 300.0  # silence that ends a job while models load and kernels compile, which may hold Python's lock
_BEAT, _WHO = "pulse/", "pulse/who/"


class Store(Protocol):
    """What is needed of torch's stores."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def multi_get(self, keys: list[str], /) -> list[bytes]: ...


class Position:
    """Where this rank is; written by the training loop, read by threads.

    Attributes:
        step: the optimizer step under way (1-based); 0 before the first.
        doing: in words: "waiting for data", "forward and backward of micro-batch 2" ...
        count: how often the rank has moved on within the step, to see who is behind.
        samples: ids of the samples of the micro-batch at hand.
        step_began: by the monotonic clock; None between steps, when checkpoints and pictures are made.
    """

    def __init__(self) -> None:
        self.step, self.doing, self.count = 0, "setting up", 0
        self.samples: Sequence[str] = ()
        self.step_began: float | None = None

    def begin(self, step: int) -> None:
        """A step begins."""
        self.step, self.count, self.samples, self.step_began = step, 0, (), time.monotonic()

    def at(self, doing: str, samples: Sequence[str] = ()) -> None:
        """The rank has moved on within the step."""
        self.doing, self.samples, self.count = doing, samples, self.count + 1

    def end(self, doing: str) -> None:
        """The step is done."""
        self.step_began, self.doing = None, doing

    def __str__(self) -> str:
        return f"step {self.step}, {self.doing}" if self.step else self.doing


position = Position()


@dataclass(frozen=True)
class Seen:
    """What is known of a rank."""

    rank: int
    host: str
    process: int
    step: int
    count: int
    doing: str

    def __str__(self) -> str:
        where = f"step {self.step}, {self.doing}" if self.step else self.doing
        return f"rank {self.rank} ({self.host}, process {self.process}), {where}"


class Pulse:
    """This rank's signs of life, and, on the ranks that look, everybody's. Its caller sees to one request at a time.

    Attributes:
        first_host: the name of rank 0's host, once it has told, to have it when rank 0 is gone.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world = store, rank, world_size
        self._looks = world_size > 1 and rank in (0, world_size - 1)
        self._number = 0
        self._last: list[bytes] = [b""] * world_size
        self._missed = [0.0] * world_size
        self._complete = False
        self._beaten = 0.0
        self.first_host = ""
        store.set(f"{_WHO}{rank}", json.dumps({"host": socket.gethostname(), "process": os.getpid()}))
        self._beat()

    def turn(self) -> None:
        """Tell where this rank is, and look at the others, if a beat has passed."""
        now = time.monotonic()
        passed = now - self._beaten
        if passed < BEAT_SECONDS:
            return
        self._beat()
        if not self.first_host and self._store.check([f"{_WHO}0"]):
            self.first_host = json.loads(self._store.get(f"{_WHO}0"))["host"]
        if self._looks:
            self._look(min(passed, 3 * BEAT_SECONDS))

    def silent(self, seconds: float) -> list[Seen]:
        """Ranks that others have not heard of for so long, the longest silent first; none on ranks that do not look."""
        ranks = [rank for rank in range(self._world) if self._missed[rank] >= seconds and rank != self._rank]
        return [self._seen(rank) for rank in sorted(ranks, key=lambda rank: -self._missed[rank])]

    def everyone(self) -> list[Seen]:
        """Where all ranks were last seen; none on ranks that do not look."""
        return [self._seen(rank) for rank in range(self._world)] if self._complete else []

    def _beat(self) -> None:
        self._number += 1
        self._beaten = time.monotonic()
        told = [self._number, position.step, position.count, position.doing]
        self._store.set(f"{_BEAT}{self._rank}", json.dumps(told))

    def _look(self, passed: float) -> None:
        keys = [f"{_BEAT}{rank}" for rank in range(self._world)]
        if not self._complete:  # a key that is not there yet would be waited for
            self._complete = self._store.check(keys)
            return
        for rank, value in enumerate(self._store.multi_get(keys)):
            self._missed[rank] = self._missed[rank] + passed if value == self._last[rank] else 0.0
            self._last[rank] = value

    def _seen(self, rank: int) -> Seen:
        who = json.loads(self._store.get(f"{_WHO}{rank}"))
        _, step, count, doing = json.loads(self._last[rank] or b'[0, 0, 0, "setting up"]')
        return Seen(rank, who["host"], who["process"], step, count, doing)
