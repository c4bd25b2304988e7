"""What happens to checkpoints once they are whole: a second copy, then room for the next. For rank 0 alone."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from pathlib import Path

from qwen_edit_zero.checkpoints import layout
from qwen_edit_zero.checkpoints.background import BackgroundThread
from qwen_edit_zero.checkpoints.backup import BackupPlace
from qwen_edit_zero.checkpoints.in_use import ReadLock
from qwen_edit_zero.checkpoints.placement import clean_leftovers
from qwen_edit_zero.checkpoints.retention import Retention, prune
from qwen_edit_zero.checkpoints.validity import is_valid
from qwen_edit_zero.errors import CheckpointError, QwenEditError


class Caretaker:
    """Copies each new checkpoint to the backup, if there is one, then deletes those that need not stay; in a thread.

    One that waits for its copy is neither deleted nor counted among those that stay: it may turn out to be damaged.
    What goes wrong does not end a run: it is told by `messages`, and tried again after the next save. `may_write` is
    asked before each copy and deletion, and raises if the folder belongs to another run now.
    """

    def __init__(
        self,
        folder: Path,
        retention: Retention,
        place: BackupPlace | None = None,
        may_write: Callable[[], None] = lambda: None,
    ) -> None:
        self._may_write = may_write
        self._folder, self._retention, self._place = folder, retention, place
        self._numbers = itertools.count()
        self._waiting: dict[Path, int] = {}  # not yet in the backup; a higher number is a later save
        self._damaged: set[Path] = set()  # as was found while it was to be copied
        self._written: list[Path] = []  # by this run, in this order
        self._messages: list[str] = []
        self._lock = threading.Lock()
        self._pruning = threading.Lock()
        self._thread = BackgroundThread("caretaker", lambda error: self._tell(f"warning: {_words(error)}"))

    def catch_up(self) -> None:
        """Remove what an earlier process left half done; copy what it left without a copy; returns at once, deletes no
        checkpoint.

        For the only writer of the folder, before it writes. Raises OSError and CheckpointError.
        """
        clean_leftovers(self._folder)
        if self._place is None:
            return
        for path in layout.checkpoint_folders(self._folder):
            if not path.is_symlink() and is_valid(path):
                self._waiting[path] = next(self._numbers)
        if self._waiting:
            self._thread.submit(self._work)

    def look_after(self, checkpoint: Path) -> None:
        """Take over a checkpoint that has just become whole; returns at once."""
        with self._lock:
            self._written.append(checkpoint)
            self._damaged.discard(checkpoint)
            if self._place is not None:
                self._waiting[checkpoint] = next(self._numbers)
        self._thread.submit(self._work)

    def settle(self) -> None:
        """Wait for deletions under way, so that the next save finds the space they free."""
        with self._pruning:
            pass

    def wait(self) -> None:
        """Wait for copies and deletions under way."""
        self._thread.wait()

    @property
    def copying(self) -> bool:
        """Whether copies are being made."""
        return self._place is not None and self._thread.busy

    @property
    def place_name(self) -> str:
        """Where copies go, for messages; empty if nowhere."""
        return "" if self._place is None else self._place.name

    def copies_after(self, seconds: float) -> bool:
        """Wait for copies under way, so long at most; whether there are some still."""
        return self._place is not None and not self._thread.wait(seconds)

    def finish(self) -> None:
        """Wait for copies and deletions under way, and tell what has no copy then. Idempotent."""
        self._thread.finish()
        with self._lock:
            left, self._waiting = sorted(path.name for path in self._waiting), {}
        if left and self._place is not None:
            self._tell(f"warning: without a copy in {self._place.name}: {', '.join(left)}. Copy what you need yourself")

    def abandon(self) -> None:
        """Begin nothing further. What is under way goes on as long as the process does, and does not hold it up."""
        self._thread.abandon()

    def messages(self) -> list[str]:
        """What went wrong since the last call, for the user."""
        with self._lock:
            told, self._messages = self._messages, []
        return told

    def _work(self) -> None:
        """Copy what waits, the newest first, and delete after each what need not stay any more."""
        tried: set[int] = set()
        self._prune()
        while (latest := self._next(tried)) is not None and not self._thread.abandoned:
            path, number = latest
            tried.add(number)
            self._copy(path, number)
            self._prune()

    def _next(self, tried: set[int]) -> tuple[Path, int] | None:
        with self._lock:
            left = [(path, number) for path, number in self._waiting.items() if number not in tried]
        return max(left, key=lambda item: item[1], default=None)

    def _copy(self, path: Path, number: int) -> None:
        assert self._place is not None
        lock = ReadLock(path)
        try:
            if path.is_dir():  # deleted meanwhile, it needs no copy
                self._may_write()
                self._place.copy(path)
        except CheckpointError as error:
            if self._leaves_queue(path, number, damaged=True):
                self._tell(
                    f"warning: {path.name} is not copied to {self._place.name}, since it cannot be used: {error}. "
                    "It is not deleted, and does not count among those that stay"
                )
        except (QwenEditError, OSError) as error:
            self._tell(
                f"warning: {path.name} is whole, but its copy in {self._place.name} could not be made: {error}. "
                "It is tried again if there is another save, and not deleted before"
            )
        else:
            self._leaves_queue(path, number)
        finally:
            lock.release()

    def _leaves_queue(self, path: Path, number: int, *, damaged: bool = False) -> bool:
        """False if a later save has taken the place of the one that was copied: then that one waits."""
        with self._lock:
            if self._waiting.get(path) != number:
                return False
            del self._waiting[path]
            if damaged:
                self._damaged.add(path)
            return True

    def _prune(self) -> None:
        """For the newest of this run that has its copy."""
        with self._lock:
            held = {*self._waiting, *self._damaged}
            newest = next((path for path in reversed(self._written) if path not in held), None)
        if newest is None:
            return
        try:
            with self._pruning:
                self._may_write()
                prune(self._folder, self._retention, newest=newest, hold=held)
        except (QwenEditError, OSError) as error:
            self._tell(f"warning: {newest.name} is whole, but older checkpoints could not be deleted: {error}")

    def _tell(self, message: str) -> None:
        with self._lock:
            self._messages.append(message)


def _words(error: Exception) -> str:
    return f"looking after checkpoints failed: {type(error).__name__}: {error}"
