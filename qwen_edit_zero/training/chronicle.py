"""What a run tells of itself beside its results: events, a log of each rank, and how it ended."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from qwen_edit_zero.cluster import last_words
from qwen_edit_zero.cluster.fencing import Fence
from qwen_edit_zero.cluster.last_words import Failure, LastWords
from qwen_edit_zero.cluster.pulse import position
from qwen_edit_zero.errors import START_AGAIN, FencedError, StorageError
from qwen_edit_zero.training.events import Events
from qwen_edit_zero.training.hang_report import write_stacks
from qwen_edit_zero.training.progress import format_seconds
from qwen_edit_zero.training.rank_log import LOGS, RankLog


class Chronicle:
    """Made on every rank once the run folder is taken; a context manager. Rank 0 has the fence, and writes the events.

    Ends that are not returns (errors, signals, the loss of other ranks) come through `cluster.failure`.
    """

    def __init__(self, folder: Path, rank: int, fence: Fence | None) -> None:
        self._folder, self._rank, self._fence = folder, rank, fence
        self._began = time.monotonic()
        self._ended = False
        self._events = None if fence is None else Events(folder, fence)
        self._log = RankLog(folder / LOGS, rank)
        last_words.at_end(LastWords(self._own_failure, self._job_ended, self._alarmed))

    def event(self, name: str, **values: Any) -> None:
        """Record an event (rank 0); none after the end. Raises FencedError."""
        if self._events is not None and not (self._ended and name != "ended"):
            self._events.write(name, **{"step": position.step} | values)

    def say(self, message: str) -> None:
        """Print a line on rank 0."""
        if self._rank == 0:
            print(message, flush=True)

    def slow(self, rank: int, how: str) -> None:
        """A rank is persistently slower than the others."""
        self.say(f"warning: {how}")
        self.event("slow", rank=rank, reason=how)

    def differs(self, how: str, ranks: list[int]) -> None:
        """Ranks do not hold or compute what all must."""
        self.say(f"warning: {how}")
        self.event("differs", ranks=ranks, reason=how)

    def may_write(self) -> None:
        """Raise FencedError if the run folder belongs to another start now (rank 0)."""
        if self._fence is not None:
            self._fence.check()

    def may_write_often(self) -> None:
        """As `may_write`, for every step: looks once a second."""
        if self._fence is not None:
            self._fence.check_often()

    @property
    def shut_out(self) -> bool:
        """Whether the folder belongs to another start now, as far as rank 0 knows."""
        try:
            self.may_write()
        except FencedError:
            return True
        except StorageError:
            pass
        return False

    def begin(self, **values: Any) -> None:
        """Record the start."""
        self.event("start", **values)
        if self._events is not None and self._events.last_ending is not None:
            self.event("restarted", after=self._events.last_ending)

    def end(self, reason: str, status: int) -> None:
        """The run ends by returning `status`."""
        self._ended = True
        self.event("ended", reason=reason, status=status, seconds=round(time.monotonic() - self._began, 1))

    def __enter__(self) -> Chronicle:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()  # else the last words are still to come

    def close(self) -> None:
        """Nothing more will be told. Idempotent."""
        last_words.at_end(None)
        self._log.close()
        if self._events is not None:
            self._events.close()

    def _own_failure(self, failed: Failure) -> None:
        self._log.write(failed.shown(alone=True))

    def _job_ended(self, failed: Failure) -> str:
        where = f" on rank {failed.rank} ({failed.host})" if not failed.asked else ""
        how = "ended" if failed.asked else "failed"
        lasted = format_seconds(time.monotonic() - self._began)
        again = ": start the same command again" if failed.status == START_AGAIN else ""
        step = f"at step {position.step}" if position.step else "before the first step"
        line = f"{self._folder.name} {how}{where} {step} after {lasted}, exit status {failed.status}{again}"
        if not self._ended:
            self._ended = True
            with contextlib.suppress(Exception):
                self.event(
                    "ended", reason=failed.text, status=failed.status, rank=failed.rank, rank_host=failed.host,
                    seconds=round(time.monotonic() - self._began, 1),
                )  # fmt: skip
            self._log.write(f"{failed.shown(alone=True)}\n{line}")
        return line

    def _alarmed(self, why: str) -> None:
        self._log.write(why)
        path = write_stacks(self._folder / LOGS, self._rank, why)
        self._log.write(f"where this rank is: {path}")
