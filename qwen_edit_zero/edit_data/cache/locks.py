"""System locks (flock) on files of the cache: who uses it, and which files a living process is still writing.

A lock ends with its process, however that ends. Network file systems that know locks (NFS, Lustre mounted with flock)
hold them between nodes; where there are none, `try_lock` says so, and age has to tell.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from pathlib import Path
from types import TracebackType
from typing import Literal

ABANDONED_SECONDS = 24 * 3600  # without locks: a file not written to for so long has no writer any more
Got = Literal["held", "busy", "unknown"]


def try_lock(fd: int, *, shared: bool = False) -> Got:
    """Ask for a lock without waiting: held, busy (somebody else has one), or unknown (this file system has none)."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return "busy"
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return "busy"
        return "unknown"
    return "held"


def is_abandoned(fd: int, path: Path) -> bool:
    """Whether nobody writes the open file `path` any more; this process then holds its lock, if there are locks."""
    got = try_lock(fd)
    if got == "busy":
        return False
    try:
        status = os.fstat(fd)
        if not os.path.samestat(status, os.stat(path)):  # renamed or replaced between opening and locking
            return False
    except OSError:
        return False
    return got == "held" or time.time() - status.st_mtime > ABANDONED_SECONDS


class CacheLock:
    """The lock of a cache folder: shared by those who use it, exclusive for who deletes from it.

    A context manager. `alone` is True while it is exclusive.
    """

    NAME = ".in-use"

    def __init__(self, folder: Path, *, exclusive: bool) -> None:
        self.alone = False
        self._fd: int | None = None
        with contextlib.suppress(OSError):  # a read-only cache can be used; nobody deletes there
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(folder / self.NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        if self._fd is not None:
            self.alone = try_lock(self._fd) == "held"
            if not self.alone and not exclusive:
                self.share()

    def share(self) -> None:
        """Let other users in; nobody who deletes. Waits for one who is deleting now."""
        self.alone = False
        if self._fd is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(self._fd, fcntl.LOCK_SH)

    def release(self) -> None:
        """Give it back. Idempotent."""
        self.alone = False
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> CacheLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
