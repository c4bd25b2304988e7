"""Files of this machine and of mounted file systems."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from qwen_edit_zero.edit_data import wording
from qwen_edit_zero.edit_data.storage.files import PictureFile, Stamp, check_limit, refusal


@dataclass(frozen=True, slots=True)
class LocalFile:
    """A file by its path; see `PictureFile`."""

    path: Path

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
            raise refusal(self.name, os_reason(error)) from error

    def open(self) -> BinaryIO:
        """See `PictureFile`."""
        try:
            self._status()
            return self.path.open("rb")
        except OSError as error:
            raise refusal(self.name, os_reason(error)) from error

    def stamp(self) -> Stamp:
        """See `PictureFile`."""
        try:
            status = self._status()
        except OSError as error:
            raise refusal(self.name, os_reason(error)) from error
        return stamp_of(status)

    def _status(self) -> os.stat_result:
        status = self.path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise refusal(self.name, "it is a folder")
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise refusal(self.name, "it is not a regular file")
        return status


@dataclass(frozen=True, slots=True)
class LocalPlace:
    """A folder; see `Place`."""

    root: Path

    @property
    def name(self) -> str:
        """See `Place`."""
        return os.fspath(self.root)

    def file(self, name: str) -> PictureFile:
        """See `Place`."""
        return LocalFile(self.root / name)

    def why_missing(self, name: str) -> str:
        """See `Place`."""
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
