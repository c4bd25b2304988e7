"""RUN/logs/rank-00003.log: what a rank printed, line by line with the time, and how it failed."""

from __future__ import annotations

import contextlib
import faulthandler
import io
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import TextIO

LOGS = "logs"
KEPT_STARTS = 5  # logs of earlier starts that stay, as rank-00003.log.1 (the last one) and so on
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class RankLog:
    """A rank's log file of this start; what the process prints from now on goes there as well.

    A start never writes into the file of another, also where both run: earlier ones are renamed, and whoever has one
    open goes on writing under its new name. Errors of the disk are told once, and otherwise ignored: a log is no reason
    to end a run.
    """

    def __init__(self, folder: Path, rank: int) -> None:
        self.path = folder / f"rank-{rank:05d}.log"
        self._lock = threading.Lock()
        self._file: TextIO | None = None
        try:
            folder.mkdir(exist_ok=True)
            _rotate(self.path)
            self._file = self.path.open("x", encoding="utf-8", buffering=1)
        except OSError as error:
            self._give_up(error)
        self._streams = sys.stdout, sys.stderr
        sys.stdout, sys.stderr = _Tee(sys.stdout, self), _Tee(sys.stderr, self)
        if self._file is not None:
            faulthandler.enable(self._file)  # a crash of a library: the stacks at that moment

    def write(self, text: str) -> None:
        """Add lines, from any thread."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        lines = "".join(f"{stamp} {line}\n" for line in text.splitlines())
        with self._lock:
            if self._file is not None:
                try:
                    self._file.write(lines)
                except (OSError, ValueError) as error:
                    self._give_up(error)

    def close(self) -> None:
        """Print as before. Idempotent."""
        if isinstance(sys.stdout, _Tee):
            sys.stdout.rest()
        if isinstance(sys.stderr, _Tee):
            sys.stderr.rest()
        sys.stdout, sys.stderr = self._streams
        if self._file is not None:
            faulthandler.disable()
            with contextlib.suppress(OSError):
                self._file.close()
            self._file = None

    def _give_up(self, error: Exception) -> None:
        self._file = None
        with contextlib.suppress(OSError, ValueError):
            sys.__stderr__.write(f"warning: {self.path} cannot be written, and is left out: {error}\n")  # type: ignore[union-attr]


class _Tee(io.TextIOBase):
    """A stream that is copied to the log by whole lines; of a line that redraws itself only what remains of it."""

    def __init__(self, terminal: TextIO, log: RankLog) -> None:
        self.terminal, self._log, self._line = terminal, log, ""

    def write(self, text: str) -> int:
        done = self.terminal.write(text)
        *whole, self._line = (self._line + text).split("\n")
        if whole:
            self._log.write("\n".join(_last_drawn(line) for line in whole) + "\n")
        self._line = self._line.rpartition("\r")[2] if len(self._line) > 10_000 else self._line
        return done

    def rest(self) -> None:
        """A last line without an end."""
        if self._line:
            self._log.write(_last_drawn(self._line))
            self._line = ""

    def flush(self) -> None:
        self.terminal.flush()

    def isatty(self) -> bool:
        return self.terminal.isatty()

    def fileno(self) -> int:
        return self.terminal.fileno()

    def writable(self) -> bool:
        return True

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self.terminal.encoding


def _last_drawn(line: str) -> str:
    return _CONTROL.sub("", line.rstrip("\r").rpartition("\r")[2])


def _rotate(path: Path) -> None:
    """Let `path` be free: `path` becomes `path.1`, `path.1` becomes `path.2` ..."""
    for number in range(KEPT_STARTS, 0, -1):
        older = path.with_name(f"{path.name}.{number}")
        newer = path if number == 1 else path.with_name(f"{path.name}.{number - 1}")
        with contextlib.suppress(FileNotFoundError):
            os.replace(newer, older)
