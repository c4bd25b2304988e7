"""Files of this machine and of mounted file systems."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from qwen_edit_zero.edit_data import wording
from qwen_edit_zero.edit_data.storage.files import (
    NotThereError,
    PictureFile,
    RangedFile,
    Stamp,
    check_limit,
    refusal,
    whole_range,
)
from qwen_edit_zero.edit_data.storage.names import resolve, why_not_there
from qwen_edit_zero.edit_data.storage.options import DEFAULTS, StorageOptions
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file by its path; see `PictureFile`."""

    path: Path
    what: str = "picture"

    @property
    def name(self) -> str:
        """See `PictureFile`."""
        return os.fspath(self.path)

    @property
    def location(self) -> str:
        """See `PictureFile`."""
        return os.path.abspath(self.path)

    def read(self, limit: int) -> bytes:
        """See `PictureFile`."""
        try:
            check_limit(self.name, self._status().st_size, limit)
            return self.path.read_bytes()
        except OSError as error:
            raise self._error(error) from error

    def open(self) -> BinaryIO:
        """See `PictureFile`."""
        try:
            self._status()
            return self.path.open("rb")
        except OSError as error:
            raise self._error(error) from error

    def read_range(self, start: int, length: int) -> bytes:
        """See `RangedFile`."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                parts = []
                while length > 0 and (part := os.pread(fd, length, start)):  # one call gives 2 GiB at most
                    parts.append(part)
                    start, length = start + len(part), length - len(part)
            finally:
                os.close(fd)
        except OSError as error:
            raise self._error(error) from error
        data = b"".join(parts)
        return whole_range(self.name, data, len(data) + length, self.what)

    def stamp(self) -> Stamp:
        """See `PictureFile`."""
        try:
            status = self._status()
        except OSError as error:
            raise self._error(error) from error
        return stamp_of(status)

    def _error(self, error: OSError) -> DataError:
        if isinstance(error, FileNotFoundError | NotADirectoryError):
            return NotThereError(f"{self.what} {shown(self.name)}: {os_reason(error)}")
        return refusal(self.name, os_reason(error), self.what)

    def _status(self) -> os.stat_result:
        status = self.path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise refusal(self.name, "it is a folder", self.what)
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise refusal(self.name, "it is not a regular file", self.what)
        return status


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """A folder; see `Place`."""

    root: Path
    options: StorageOptions = DEFAULTS

    @property
    def name(self) -> str:
        """See `Place`."""
        return os.fspath(self.root)

    def file(self, name: str) -> PictureFile:
        """See `Place`."""
        if "//" in name:  # rare: a member of an archive, or a URL that data.outside allows
            return resolve(name, self)
        return LocalFile(self.root / name)

    def plain(self, name: str, what: str) -> RangedFile:
        """The file of a name that names no member and is no URL."""
        return LocalFile(self.root / name, what)

    def why_missing(self, name: str) -> str:
        """See `Place`."""
        if "//" in name:
            return why_not_there(name, self)
        return wording.why_missing(self.root, name)


def stamp_of(status: os.stat_result) -> Stamp:
    """The stamp of a local file from its status."""
    version = f"{status.st_ino}-{status.st_mtime_ns}-{status.st_ctime_ns}"
    return Stamp(status.st_size, version, max(status.st_mtime_ns, status.st_ctime_ns))


def os_reason(error: OSError) -> str:
    """Why the operating system did not give a file."""
    if isinstance(error, FileNotFoundError | NotADirectoryError):
        return "there is no such file"
    return f"it cannot be read ({error.strerror or error})"
