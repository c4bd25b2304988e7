"""A contestant in a process of its own, and the most memory that it held."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Watched:
    """What a process wrote to stdout and stderr, its exit status, and its peaks in MiB by name of /proc's status."""

    output: str
    errors: str
    status: int
    peaks: dict[str, float]


def run_watched(module: str, arguments: Sequence[str], fields: Sequence[str], *, every: float) -> Watched:
    """Run `python -m module arguments`, looking at these fields of /proc/PID/status every so many seconds."""
    child = subprocess.Popen(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    peaks = dict.fromkeys(fields, 0.0)

    def watch() -> None:
        while child.poll() is None:
            try:
                status = Path(f"/proc/{child.pid}/status").read_text()
            except OSError:
                return
            for line in status.splitlines():
                key = line.split(":")[0]
                if key in peaks:
                    peaks[key] = max(peaks[key], int(line.split()[1]) / 1024)
            time.sleep(every)

    watcher = threading.Thread(target=watch)
    watcher.start()
    output, errors = child.communicate()
    watcher.join()
    return Watched(output, errors, child.returncode, peaks)
