"""Files that survive power loss: written, checksummed and synced, with bounded memory."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections import OrderedDict
from pathlib import Path
from types import TracebackType
from typing import Any

import xxhash

from qwen_edit_zero.errors import StorageError

CHUNK_BYTES = 16 * 2**20  # the most held in memory of a tensor at a time
VISIBLE_WITHIN_SECONDS = 20.0  # network file systems may show another node's new file late
_NO_FOLDER_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EACCES}  # file systems without it


class ChecksummedFile:
    """A new file, written from start to end; knows its size and XXH3-64. Synced to disk when left without error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0
        self._hash = xxhash.xxh3_64()
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)

    @property
    def checksum(self) -> str:
        """XXH3-64 of what was written so far, 16 hex digits."""
        return self._hash.hexdigest()

    def write(self, data: Any) -> None:
        """Append a bytes-like object. Raises OSError naming the file."""
        view = memoryview(data)
        assert view.format == "B", view.format
        self._hash.update(view)
        self.size += len(view)
        while len(view):
            try:
                written = os.write(self._fd, view)
            except OSError as error:
                raise OSError(error.errno, error.strerror, str(self.path)) from None
            view = view[written:]

    def __enter__(self) -> ChecksummedFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                try:
                    os.fsync(self._fd)  # some file systems tell only here that the disk is full
                except OSError as failed:
                    raise OSError(failed.errno, failed.strerror, str(self.path)) from None
        finally:
            os.close(self._fd)


class OpenFiles:
    """Positional reads from many files, of which only the most recently used stay open. Not for several threads."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._fds: OrderedDict[Path, int] = OrderedDict()

    def read_into(self, path: Path, offset: int, view: memoryview) -> None:
        """Fill `view` with the bytes at `offset`. Raises OSError naming the file, also if it ends before."""
        try:
            fd = self._open(path)
            while len(view):
                count = os.preadv(fd, [view[: 2**30]], offset)  # Linux reads at most 2 GiB a call
                if count == 0:
                    raise OSError(errno.EIO, f"the file ends at byte {offset}", str(path))
                view, offset = view[count:], offset + count
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from None

    def _open(self, path: Path) -> int:
        if path in self._fds:
            self._fds.move_to_end(path)
            return self._fds[path]
        while len(self._fds) >= self._most:
            os.close(self._fds.popitem(last=False)[1])
        self._fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return self._fds[path]

    def close(self) -> None:
        """Close all. Idempotent; a later read opens them again."""
        while self._fds:
            os.close(self._fds.popitem()[1])


def write_file(path: Path, content: bytes) -> ChecksummedFile:
    """Write a small file and sync it."""
    with ChecksummedFile(path) as file:
        file.write(content)
    return file


def sync_folder(path: Path) -> None:
    """Make renames and new names in a folder durable (where the file system knows how)."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_FOLDER_SYNC:
            raise
    finally:
        os.close(fd)


def wait_for(path: Path, hint: str) -> None:
    """Wait for a file made on another node; StorageError with this hint if it stays away."""
    deadline = time.monotonic() + VISIBLE_WITHIN_SECONDS
    while not path.exists():
        if time.monotonic() > deadline:
            raise StorageError(hint)
        time.sleep(0.05)
        with contextlib.suppress(OSError):
            os.listdir(path.parent)  # makes NFS look again


def checksum_of(path: Path) -> str:
    """XXH3-64 of a file, 16 hex digits, read in chunks. Raises OSError."""
    digest = xxhash.xxh3_64()
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


_ADVICE = {
    errno.ENOSPC: "free some space or keep fewer checkpoints",
    errno.EDQUOT: "free some of your quota, have it raised, or keep fewer checkpoints",
    errno.EFBIG: "see `ulimit -f` and the file system's limit on file sizes",
    errno.EROFS: "the file system is read-only now, which some become after a disk error; see `dmesg` and `mount`",
    errno.EIO: "the disk or the network file system has failed; see `dmesg`",
    errno.ESTALE: "the network file system lost this folder; see whether it is still mounted",
    errno.ENOTCONN: "the file system is not mounted any more",
}


def advice(error: OSError) -> str:
    """What to do about a failed write, beginning with `; `, if its kind says something; else an empty string."""
    text = _ADVICE.get(error.errno or 0)
    return f"; {text}" if text else ""


def bytes_text(count: float) -> str:
    """A size for people: `3.4 GB`."""
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "bytes" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"
