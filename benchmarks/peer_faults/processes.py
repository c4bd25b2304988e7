"""The processes of one job, wherever they are: told by the job's folder in their command lines."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    """A launcher, a helper of one, or a rank."""

    pid: int
    parent: int
    rank: int | None  # None: not a rank


def of_job(folder: Path) -> list[Process]:
    """Every process of the job whose folder this is."""
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError):
                if os.fsencode(folder) + b"/" in Path(f"/proc/{entry}/cmdline").read_bytes():
                    fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                    found.append(Process(int(entry), int(fields[1]), _rank(int(entry))))
    return found


def ranks_of(folder: Path, *ranks: int) -> list[int]:
    """Ids of the processes of these ranks, without their own children."""
    found = {process.pid: process for process in of_job(folder) if process.rank is not None}
    return [p.pid for p in found.values() if p.rank in ranks and p.parent not in found]


def send(number: signal.Signals, pids: Iterable[int]) -> None:
    """Send a signal to processes, those that are gone left out."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def sweep(folder: Path) -> None:
    """End everything of a job."""
    deadline = time.monotonic() + 20
    while (left := of_job(folder)) and time.monotonic() < deadline:
        send(signal.SIGKILL, [process.pid for process in left])
        time.sleep(0.1)


def _rank(pid: int) -> int | None:
    for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if variable.startswith(b"RANK="):
            return int(variable[5:])
    return None
