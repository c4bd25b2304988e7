"""One live line on rank 0's terminal; plain lines where the output is not a terminal."""

from __future__ import annotations

import os
import sys
import time
from typing import TextIO

from tqdm import tqdm


def format_seconds(seconds: float) -> str:
    """`83.2` -> `1:23`, `7384` -> `2:03:04`."""
    total = max(0, round(seconds))
    hours, rest = divmod(total, 3600)
    minutes, secs = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{secs:02d}" if hours else f"{minutes}:{secs:02d}"


class Progress:
    """Counts `total` units of work under a title; silent on ranks other than 0.

    On a terminal it is one bar, redrawn. Elsewhere it prints a line every `every` units and at the end, at most one
    every `min_seconds` seconds, so that a log file stays readable.

    Args:
        initial: units that were done before, as by the run that this one goes on from.
        since: when (`time.monotonic`) these were begun, if they count for the time that is left; None: they do not.
    """

    def __init__(
        self,
        title: str,
        total: int,
        *,
        rank: int,
        initial: int = 0,
        since: float | None = None,
        every: int = 1,
        min_seconds: float = 0.0,
        stream: TextIO | None = None,
    ) -> None:
        self._title, self._total, self._done = title, total, initial
        self._before = initial if since is None else 0
        self._stream = stream if stream is not None else sys.stdout
        self._every, self._min_seconds = every, min_seconds
        self._active = rank == 0
        self._started = time.monotonic() if since is None else since
        self._last_line = -min_seconds
        # Open MPI gives ranks a terminal of its own making and copies what they write, redrawn bars included
        terminal = self._active and self._stream.isatty() and "OMPI_COMM_WORLD_RANK" not in os.environ
        self._bar = (
            tqdm(total=total, initial=initial, desc=title, file=self._stream, dynamic_ncols=True, leave=True)
            if terminal
            else None
        )

    def advance(self, units: int = 1, text: str = "") -> None:
        """Count `units` more as done; `text` says how it goes (loss, rate ...)."""
        self._done += units
        if not self._active:
            return
        if self._bar is not None:
            self._bar.set_postfix_str(text, refresh=False)
            self._bar.update(units)
            return
        now = time.monotonic() - self._started
        finished = self._done >= self._total
        due = self._done % self._every == 0 and now - self._last_line >= self._min_seconds
        if due or finished:
            self._last_line = now
            self._line(now, text)

    def _line(self, elapsed: float, text: str) -> None:
        fresh = self._done - self._before
        left = elapsed / fresh * (self._total - self._done) if fresh else 0.0
        parts = [f"{self._title} {self._done}/{self._total}", text, f"left {format_seconds(left)}"]
        print("  ".join(p for p in parts if p), file=self._stream, flush=True)

    def say(self, message: str) -> None:
        """Print a line without tearing the bar."""
        if not self._active:
            return
        if self._bar is not None:
            self._bar.write(message, file=self._stream)
        else:
            print(message, file=self._stream, flush=True)

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


class LateProgress:
    """As `Progress`, but nothing is shown of work that is done within `after_seconds`."""

    def __init__(
        self, title: str, total: int, *, rank: int, after_seconds: float = 5.0, stream: TextIO | None = None
    ) -> None:
        self._title, self._total, self._rank, self._stream = title, total, rank, stream
        self._started = time.monotonic()
        self._after = after_seconds
        self._done = 0
        self._shown: Progress | None = None

    def advance(self, units: int = 1, text: str = "") -> None:
        """Count `units` more as done; `text` says how it goes."""
        if self._shown is None and time.monotonic() - self._started > self._after:
            self._shown = Progress(
                self._title,
                self._total,
                rank=self._rank,
                initial=self._done,
                since=self._started,
                min_seconds=5.0,
                stream=self._stream,
            )
        if self._shown is not None:
            self._shown.advance(units, text)
        self._done += units

    def close(self) -> None:
        """Leave the bar as it stands."""
        if self._shown is not None:
            self._shown.close()
