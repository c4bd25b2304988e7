"""Telling other processes that a checkpoint is being read, so that retention does not delete it meanwhile.

A reader holds a shared lock (flock) on the manifest; who wants to delete asks for an exclusive one. A lock ends with
its process, whatever happens to it. File systems without locks give none, and there nothing is protected.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

from qwen_edit_zero.checkpoints.layout import MANIFEST


class ReadLock:
    """A shared lock on a checkpoint, from construction until `release`. Never waits, never raises."""

    def __init__(self, checkpoint: Path) -> None:
        self._fd: int | None = None
        with contextlib.suppress(OSError):
            self._fd = os.open(checkpoint / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
            fcntl.flock(self._fd, fcntl.LOCK_SH | fcntl.LOCK_NB)

    def release(self) -> None:
        """Give it back. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def is_being_read(checkpoint: Path) -> bool:
    """Whether somebody holds a ReadLock on this checkpoint."""
    try:
        fd = os.open(checkpoint / MANIFEST, os.O_RDWR | os.O_CLOEXEC)  # NFS wants it writable for an exclusive lock
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
    return False
