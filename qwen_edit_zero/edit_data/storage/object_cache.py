"""Objects of stores kept on a disk of this node: bounded, shared by its processes, the least recently used go first."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import xxhash

from qwen_edit_zero.edit_data.storage.files import Stamp
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import SettingsError, StorageError

_CHECKSUM_BYTES = 16
_ABANDONED_SECONDS = 3600.0
_KEPT = 0.9  # of the limit, when room is made: so making room is rare


class ObjectCache:
    """A folder of whole objects by URL and stamp, so that a changed object is another entry.

        ab/abcdef...        content and its XXH3-128
        unfinished/         being written; entries appear whole, by rename
        used, lock          bytes in all entries, changed under the lock

    Threads, processes and containers of a node may share it. Two that fetch one object at once both write it, and one
    of the equal files stays.

    Raises SettingsError if the folder cannot be made or written.
    """

    def __init__(self, folder: Path, limit: int) -> None:
        self._folder, self._limit = folder, limit
        try:
            (folder / "unfinished").mkdir(parents=True, exist_ok=True)
            with self._locked():
                pass
        except OSError as error:
            raise SettingsError(
                f"data.storage.cache_dir {shown(folder)} cannot be written ({error.strerror or error}); name a folder "
                "on a disk of every node, or null"
            ) from error
        self._sweep()

    def get(self, location: str, stamp: Stamp) -> bytes | None:
        """The content of an object, if it is there and whole."""
        path = self._path(location, stamp)
        try:
            data = path.read_bytes()
        except OSError:
            return None
        content = data[:-_CHECKSUM_BYTES]
        if len(content) != stamp.size or xxhash.xxh3_128_digest(content) != data[-_CHECKSUM_BYTES:]:
            with contextlib.suppress(OSError):
                path.unlink()  # damaged by a crash of the node, or by its disk
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # its place in the order of last use
        return content

    def put(self, location: str, stamp: Stamp, content: bytes) -> None:
        """Keep an object. What is larger than a quarter of the cache is not kept: it would drive out all others.

        Raises:
            StorageError: the disk is full or fails.
        """
        size = len(content) + _CHECKSUM_BYTES
        if size > self._limit // 4:
            return
        path = self._path(location, stamp)
        temporary = self._folder / "unfinished" / uuid.uuid4().hex
        try:
            try:
                temporary.write_bytes(content + xxhash.xxh3_128_digest(content))
                path.parent.mkdir(exist_ok=True)
                with self._locked():
                    used = self._used() + (0 if path.exists() else size)
                    os.replace(temporary, path)
                    self._note(self._make_room() if used > self._limit else used)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise StorageError(
                f"data.storage.cache_dir {shown(self._folder)}: keeping an object of {len(content):,} bytes failed "
                f"({error.strerror or error}); make room, or lower data.storage.cache_gb"
            ) from error

    def _path(self, location: str, stamp: Stamp) -> Path:
        named = f"{location}\0{stamp.size}\0{stamp.version}".encode("utf-8", "surrogatepass")
        name = hashlib.blake2b(named, digest_size=20).hexdigest()
        return self._folder / name[:2] / name

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        # opened anew each time: locks belong to open files, which threads and forked processes would share
        fd = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _used(self) -> int:
        try:
            return int((self._folder / "used").read_text())
        except (OSError, ValueError):  # a new cache, or one whose counter was lost
            return sum(status.st_size for _, status in self._entries())

    def _note(self, used: int) -> None:
        (self._folder / "used").write_text(str(used))

    def _make_room(self) -> int:
        """Delete what was used longest ago. Returns the bytes left, counted anew."""
        entries = sorted(self._entries(), key=lambda entry: entry[1].st_mtime_ns)
        used = sum(status.st_size for _, status in entries)
        for path, status in entries:
            if used <= self._limit * _KEPT:
                break
            with contextlib.suppress(OSError):
                os.unlink(path)
                used -= status.st_size
        return used

    def _entries(self) -> Iterator[tuple[str, os.stat_result]]:
        with os.scandir(self._folder) as folders:
            for folder in folders:
                if len(folder.name) != 2:
                    continue
                with os.scandir(folder.path) as files:
                    for file in files:
                        with contextlib.suppress(OSError):
                            yield file.path, file.stat()

    def _sweep(self) -> None:
        """Delete what writers that died left behind."""
        for leftover in (self._folder / "unfinished").iterdir():
            with contextlib.suppress(OSError):
                if time.time() - leftover.stat().st_mtime > _ABANDONED_SECONDS:
                    leftover.unlink()
