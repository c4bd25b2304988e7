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
    """Copies each new checkpoint to the backup, in a thread, and then deletes those that need not stay.

    Nothing is deleted before the newest is in the backup. What goes wrong does not end a run: it is told by
    `messages`, and tried again after the next save.
    """

    def __init__(self, folder: Path, retention: Retention, place: BackupPlace | None = None) -> None:
        self._folder, self._retention, self._place = folder, retention, place
        self._waiting: list[Path] = []  # whole, but not yet in the backup; oldest first
        self._messages: list[str] = []
        self._lock = threading.Lock()
        self._thread = None if place is None else ThreadPoolExecutor(1, thread_name_prefix="backup")
        self._working: Future[None] | None = None

    def look_after(self, checkpoint: Path) -> None:
        """Take over a checkpoint that has just become whole. Returns at once if there is a backup to be made."""
        if self._thread is None:
            self._prune(checkpoint)
            return
        with self._lock:
            self._waiting = [p for p in self._waiting if p != checkpoint] + [checkpoint]
        self._working = self._thread.submit(self._back_up, checkpoint)

    @property
    def busy(self) -> bool:
        """Whether a copy is being made."""
        return self._working is not None and not self._working.done()

    def finish(self) -> None:
        """Wait for the copies that are being made. Idempotent."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def abandon(self) -> None:
        """Begin no further copy. The one being made goes on as long as the process does."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def messages(self) -> list[str]:
        """What went wrong since the last call, for the user."""
        with self._lock:
            told, self._messages = self._messages, []
        return told

    def _back_up(self, newest: Path) -> None:
        with self._lock:
            waiting = list(self._waiting)
        newest_is_copied = False
        for path in reversed(waiting):
            if self._copy(path):
                newest_is_copied |= path == newest
        if newest_is_copied:
            self._prune(newest)

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
            prune(self._folder, self._retention, protect=staying)
        except (QwenEditError, OSError) as error:
            self._tell(f"warning: {newest.name} is whole, but older checkpoints could not be deleted: {error}")

    def _tell(self, message: str) -> None:
        with self._lock:
            self._messages.append(message)
