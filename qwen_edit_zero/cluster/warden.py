"""A small process beside each rank that ends it when it is frozen, where nothing else on its node could.

A stopped process (SIGSTOP), or one in which a library holds Python's lock for ever, cannot end itself, and its launcher
waits for it. The others end the job after `run.silent_seconds` without it; its warden ends it soon afterwards. It
counts only time in which it ran itself, so that a job that is suspended as a whole (`scontrol suspend`) is left alone.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

MARGIN_SECONDS = 10.0  # after which the warden follows the others, who can tell why
_PROGRAM = """
import os, select, signal, sys, time
rank, name = int(sys.argv[1]), sys.argv[2]
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE):
    signal.signal(number, signal.SIG_IGN)
limit = left = float(sys.argv[3])
last = time.monotonic()
while os.getppid() == rank:
    if select.select([0], [], [], 1.0)[0]:
        told = os.read(0, 4096).split()
        if not told:
            break
        limit = left = float(told[-1])
    now = time.monotonic()
    left -= min(now - last, 2.0)
    last = now
    if left < 0 and os.getppid() == rank:
        os.kill(rank, signal.SIGKILL)
        os.write(2, ("%s was frozen for %.0f s, and has been killed\\n" % (name, limit)).encode())
        break
"""


class Warden:
    """The warden of this process, called `name` in what it says. It ends with this process, or when closed."""

    def __init__(self, name: str, seconds: float) -> None:
        self._pipe: int | None = None
        self._process: subprocess.Popen[bytes] | None = None
        read, write = os.pipe()
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(os.getpid()), name, str(seconds + MARGIN_SECONDS)]
        with contextlib.suppress(OSError):
            self._process = subprocess.Popen(command, stdin=read, stdout=subprocess.DEVNULL)
            os.set_blocking(write, False)
            self._pipe = write
        os.close(read)
        if self._pipe is None:
            os.close(write)  # no process could be started: then there is none

    def alive(self, seconds: float) -> None:
        """This process runs; unless this is called again within `seconds` (and a margin) it is to be killed."""
        if self._pipe is not None:
            with contextlib.suppress(OSError):  # full: the warden is behind; broken: somebody has ended it
                os.write(self._pipe, b"%.1f\n" % (seconds + MARGIN_SECONDS))

    def close(self) -> None:
        """End the warden. Idempotent."""
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None
        if self._process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=2)
