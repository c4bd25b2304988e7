"""Signals that ask a run to end: SIGTERM, SIGUSR1, SIGUSR2 and Ctrl-C (SIGINT).

While steps are trained, the first one is only noted (`requested`): the trainer asks after each step, over all ranks,
and saves. At any other time there is nothing to save that is not saved already, and the process ends at once. A second
signal always ends at once. One that comes within `SAME_SECONDS` of the first is that same request: launchers pass
signals on to ranks that their cluster's scheduler or the terminal has told as well.

The interpreter's handlers run only between two operations of the main thread, which may be inside a collective for
ever; so the system writes the number of each signal to a pipe (`signal.set_wakeup_fd`), which a thread reads.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from qwen_edit_zero.cluster import failure
from qwen_edit_zero.errors import START_AGAIN

ASKING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
SAME_SECONDS = 5.0


class _Listener:
    """What has been asked of this process, and what it is doing."""

    def __init__(self) -> None:
        self.deferring = False
        self.leaving = False
        self.first: tuple[signal.Signals, float] | None = None
        self._read, write = os.pipe()
        os.set_blocking(write, False)
        for number in ASKING:
            signal.signal(number, _nothing)
            signal.siginterrupt(number, False)  # no system call of a library ends early
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        threading.Thread(target=self._listen, name="signals", daemon=True).start()

    def _listen(self) -> None:
        while data := os.read(self._read, 1):
            if data[0] not in ASKING:
                continue
            if failure.is_ending():
                failure.asked_meanwhile()
            elif not self.leaving:
                self._act(signal.Signals(data[0]))

    def _act(self, number: signal.Signals) -> None:
        now = time.monotonic()
        if self.first is None:
            self.first = number, now
            if not self.deferring:
                self.end()
        elif now - self.first[1] > SAME_SECONDS:
            failure.end_now(
                f"{number.name} after {self.first[0].name}: ended at once, without saving; the same command goes on "
                "from the newest checkpoint",
                128 + number,
            )

    def end(self) -> NoReturn:
        """Leave on account of the first signal, with nothing to save."""
        assert self.first is not None
        number = self.first[0]
        if number == signal.SIGINT:
            failure.end_now("interrupted", 130)
        failure.end_now(
            f"ended by {number.name} outside of training; nothing is lost, and the same command starts again (exit "
            f"status {START_AGAIN})",
            START_AGAIN,
        )


_listener: _Listener | None = None


def listen() -> None:
    """Begin to act on signals; only in the main thread. Does nothing where that was done before."""
    global _listener
    if _listener is None and threading.current_thread() is threading.main_thread():
        _listener = _Listener()


@contextmanager
def deferred() -> Iterator[None]:
    """While steps are trained: a first signal is noted, and acted on by who asks `requested`."""
    if _listener is None:
        yield
        return
    _listener.deferring = True
    try:
        yield
    finally:
        _listener.deferring = False


def requested() -> str | None:
    """Name of the signal that asked this process to end, if one did."""
    if _listener is None or _listener.first is None:
        return None
    return _listener.first[0].name


def ignore() -> None:
    """The run is over and this process about to end: whoever ends others on that account has nothing to ask."""
    if _listener is not None:
        _listener.leaving = True


def _nothing(number: int, frame: object) -> None:
    """So that the signal does not do what it does by itself."""
