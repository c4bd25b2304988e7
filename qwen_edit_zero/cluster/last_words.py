"""Why a job ends, and what is said and written down at the end of its processes."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from qwen_edit_zero.cluster.mpi import abort_if_initialised
from qwen_edit_zero.cluster.pulse import position

FAREWELL_SECONDS = 3.0  # for the last words into files, whose disk may have gone


@dataclass(frozen=True)
class Failure:
    """Why a job ends. Two ranks with the same `text` fail alike.

    Attributes:
        rank, host: whose failure it is.
        text: the cause, in words.
        status: exit status.
        detail: a traceback, shown before the text.
        asked: it is no error: a signal asked for it.
        by, by_host: who tells of it, where that is another rank.
        step: the step under way; 0: none yet.
    """

    rank: int
    host: str
    text: str
    status: int
    detail: str = ""
    asked: bool = False
    by: int = -1
    by_host: str = ""
    step: int = field(default_factory=lambda: position.step)

    def __post_init__(self) -> None:
        if self.by < 0:
            object.__setattr__(self, "by", self.rank)
            object.__setattr__(self, "by_host", self.host)

    def shown(self, *, alone: bool) -> str:
        """What the user sees; `alone` if this is not rank 0 speaking for all."""
        step = f" at step {self.step}" if self.step else ""
        where = f" on rank {self.rank} ({self.host}){step}" if alone or self.by != self.rank else ""
        if self.asked or self.status == 130:
            return f"{self.text}{where}"
        return f"{self.detail}error{where}: {self.text}"


@dataclass(frozen=True)
class LastWords:
    """What a run does at the end of its processes; called once, in any thread, and not waited for long.

    Attributes:
        own: this rank's own failure, for its log.
        job: why the job ends; returns the last line for the user, which one rank prints.
        alarmed: somebody asks all ranks to write down where they are, and says why.
    """

    own: Callable[[Failure], None]
    job: Callable[[Failure], str]
    alarmed: Callable[[str], None]


_last_words: LastWords | None = None


def at_end(words: LastWords | None) -> None:
    """What is to be done when processes end other than by returning from `main`; None: nothing any more."""
    global _last_words
    _last_words = words


def are_expected() -> bool:
    """Whether `at_end` has been told what to do."""
    return _last_words is not None


def own(failure: Failure) -> None:
    """This rank's own failure, for its log."""
    _say_last_words(lambda words: words.own(failure))


def alarmed(text: str) -> None:
    """Write down where this rank is."""
    _say_last_words(lambda words: words.alarmed(text))


def close(failure: Failure, *, speaks: bool) -> None:
    """The run's own last words, once; the last line of all where this rank speaks."""
    line: list[str] = []
    _say_last_words(lambda words: line.append(words.job(failure)))
    if speaks and line:
        say(line[0])


def _say_last_words(run_with: Callable[[LastWords], None]) -> None:
    """In a thread, since files may lie on a disk that does not answer any more."""
    words = _last_words
    if words is None:
        return

    def run() -> None:
        with contextlib.suppress(Exception):
            run_with(words)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(FAREWELL_SECONDS)


def say(text: str) -> None:
    """On the terminal only: a rank's log gets `LastWords`, whether the rank speaks or not."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        stream = getattr(sys.stderr, "terminal", sys.stderr)
        stream.write(f"{text}\n")
        stream.flush()


def leave(status: int) -> NoReturn:
    """End this process now: neither finalisers nor threads nor collectives in flight may hold it."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    abort_if_initialised(status)
    os._exit(status)
