"""Telling other processes that a checkpoint is being read, so that retention does not delete it meanwhile.

A reader holds a shared lock (flock) on the manifest; who wants to delete asks for an exclusive one. A lock ends with
its process, whatever happens to it. File systems without locks give none, and there nothing is protected.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from qwen_edit_zero.checkpoints.layout import MANIFEST

_WAITS_SECONDS = 1.0  # for somebody who looks whether it may be deleted, which takes no longer than a rename


class ReadLock:
    """A shared lock on a checkpoint, from construction until `release`. Waits a second at most, never raises.

    Where it cannot be had (no such checkpoint, no locks on this file system), there is none.
    """

    def __init__(self, checkpoint: Path) -> None:
        self._fd: int | None = None
        path, deadline = checkpoint / MANIFEST, time.monotonic() + _WAITS_SECONDS
        with contextlib.suppress(OSError):
            while not self._try(path) and time.monotonic() < deadline:
                time.sleep(0.01)

    def _try(self, path: Path) -> bool:
        """False if it is worth another try. Raises OSError if it is not."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if not os.path.samestat(os.fstat(fd), os.stat(path)):  # renamed away between opening and locking
                os.close(fd)
                return False
        except OSError as error:
            os.close(fd)
            if isinstance(error, BlockingIOError):
                return False
            raise
        self._fd = fd
        return True

    def release(self) -> None:
        """Give it back. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class DeletionLock:
    """What somebody holds who is about to delete a checkpoint; `free` says whether nobody reads it."""

    def __init__(self, checkpoint: Path) -> None:
        self.free = True
        self._fd: int | None = None
        with contextlib.suppress(OSError):  # without locks nothing is protected
            self._fd = os.open(checkpoint / MANIFEST, os.O_RDWR | os.O_CLOEXEC)  # NFS wants it so for such a lock
        if self._fd is not None:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                self.free = not isinstance(error, BlockingIOError)

    def release(self) -> None:
        """Give it back: before the files are deleted, since NFS keeps those that are open. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@contextlib.contextmanager
def deletion_lock(checkpoint: Path) -> Iterator[DeletionLock]:
    """Keep readers away until the checkpoint has lost its name; `free` is False if one is there."""
    lock = DeletionLock(checkpoint)
    try:
        yield lock
    finally:
        lock.release()
