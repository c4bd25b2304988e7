"""System locks (flock) on files of the cache: who uses it, and which files a living process is still writing.

A lock ends with its process, however that ends. Network file systems that know locks (NFS, Lustre mounted with flock)
hold them between nodes; where there are none, `try_lock` says so, and age has to tell.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Literal

from qwen_edit_zero.edit_data.wording import shown

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
    if not _is_at(fd, path):  # renamed or replaced between opening and locking
        return False
    return got == "held" or time.time() - os.fstat(fd).st_mtime > ABANDONED_SECONDS


@contextlib.contextmanager
def waited_lock(path: Path) -> Iterator[None]:
    """Be the only one who has the lock of this file, which is made; without a right to it, or without locks, go on."""
    fd: int | None = None
    try:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        if fd is not None:
            os.close(fd)


def create_locked(folder: Path, ending: str) -> tuple[Path, int]:
    """A new file of a name that no other has, open for reading and writing, and locked. Raises OSError.

    Between being made and being locked it looks abandoned: if somebody has taken it for that, another one is made.
    """
    while True:
        path = folder / f"{uuid.uuid4().hex}{ending}"
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        if try_lock(fd) != "busy" and _is_at(fd, path):
            return path, fd
        os.close(fd)


def _is_at(fd: int, path: Path) -> bool:
    """Whether the open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except OSError:
        return False


class CacheLock:
    """The lock of a cache folder: shared by those who use it, exclusive for who deletes from it.

    A context manager. `alone` is True while it is exclusive, as it is at first for the only user: until `share` others
    wait.
    """

    NAME = ".in-use"

    def __init__(self, folder: Path, *, exclusive: bool) -> None:
        self.alone = False
        self._folder = folder
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
                if try_lock(self._fd, shared=True) == "busy":
                    print(
                        f"waiting for the cache folder {shown(self._folder)}: another process deletes from it, or "
                        "begins to use it",
                        file=sys.stderr,
                        flush=True,
                    )
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
