"""What happens to checkpoints once they are whole: a second copy, then room for the next. For rank 0 alone."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from qwen_edit_zero.checkpoints.backup import BackupPlace
from qwen_edit_zero.checkpoints.in_use import ReadLock
from qwen_edit_zero.checkpoints.retention import Retention, prune
from qwen_edit_zero.errors import QwenEditError


class Caretaker:
    """Copies each new checkpoint to the backup, if there is one, then deletes those that need not stay; in a thread.

    Nothing is deleted before the newest is in the backup. What goes wrong does not end a run: it is told by
    `messages`, and tried again after the next save.
    """

    def __init__(self, folder: Path, retention: Retention, place: BackupPlace | None = None) -> None:
        self._folder, self._retention, self._place = folder, retention, place
        self._waiting: list[Path] = []  # whole, but not yet in the backup; oldest first
        self._messages: list[str] = []
        self._lock = threading.Lock()
        self._pruning = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="caretaker")
        self._working: Future[None] | None = None

    def look_after(self, checkpoint: Path) -> None:
        """Take over a checkpoint that has just become whole; returns at once."""
        if self._place is not None:
            with self._lock:
                self._waiting = [p for p in self._waiting if p != checkpoint] + [checkpoint]
        self._working = self._thread.submit(self._look_after, checkpoint)

    def settle(self) -> None:
        """Wait for deletions under way, so that the next save finds the space they free."""
        with self._pruning:
            pass

    @property
    def copying(self) -> bool:
        """Whether a copy is being made."""
        return self._place is not None and self._working is not None and not self._working.done()

    def finish(self) -> None:
        """Wait for copies and deletions under way. Idempotent."""
        self._thread.shutdown(wait=True)

    def abandon(self) -> None:
        """Begin nothing further. What is under way goes on as long as the process does."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def messages(self) -> list[str]:
        """What went wrong since the last call, for the user."""
        with self._lock:
            told, self._messages = self._messages, []
        return told

    def _look_after(self, newest: Path) -> None:
        if self._place is None or self._back_up(newest):
            self._prune(newest)

    def _back_up(self, newest: Path) -> bool:
        """Copy what waits for it, the newest first; returns whether that one has its copy."""
        with self._lock:
            waiting = list(self._waiting)
        copied = [path for path in reversed(waiting) if self._copy(path)]
        return newest in copied

    def _copy(self, path: Path) -> bool:
        assert self._place is not None
        lock = ReadLock(path)
        try:
            if path.is_dir():  # deleted meanwhile, it needs no copy
                self._place.copy(path)
        except (QwenEditError, OSError) as error:
            self._tell(
                f"warning: {path.name} is whole, but its copy in {self._place.name} could not be made: {error}. "
                "It is tried again after the next save; until then no older checkpoint is deleted"
            )
            return False
        finally:
            lock.release()
        with self._lock:
            self._waiting.remove(path)
        return True

    def _prune(self, newest: Path) -> None:
        with self._lock:
            staying = {newest, *self._waiting}
        try:
            with self._pruning:
                prune(self._folder, self._retention, protect=staying)
        except (QwenEditError, OSError) as error:
            self._tell(f"warning: {newest.name} is whole, but older checkpoints could not be deleted: {error}")

    def _tell(self, message: str) -> None:
        with self._lock:
            self._messages.append(message)
