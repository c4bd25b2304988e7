"""What the rest of the data side knows of where bytes lie: a file that can be read, and a place that names lie in."""

from __future__ import annotations

import io
import time
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError

_TOO_YOUNG_NS = 2_000_000_000  # coarsest time stamps of the file systems in use


class NotThereError(DataError):
    """There is no file of that name; `Place.why_missing` may say more."""


class Stamp(NamedTuple):
    """What tells, without reading a file, that its content is still what it was.

    Attributes:
        size: bytes.
        version: text that changes whenever the content may have: inode and times of a local file, the ETag of an
            object, the archive's stamp and the place in it of a member.
        changed_ns: when the file last changed, in ns since 1970, where the version is made of times; else 0.
    """

    size: int
    version: str
    changed_ns: int = 0

    def is_settled(self) -> bool:
        """False of a file so young that it may change again with the same stamp: do not remember anything by it."""
        return time.time_ns() - self.changed_ns > _TOO_YOUNG_NS


class PictureFile(Protocol):
    """The bytes of a picture, wherever they lie. May be used by several threads, and in forked or other processes.

    All methods raise DataError, which names the file, where the file itself is at fault (missing, a folder, access to
    it denied, larger than allowed), and StorageError where the store is (it does not answer after all retries):
    the first refuses a row, the second ends a run, so that no outage leaves rows out.
    """

    @property
    def name(self) -> str:
        """For messages: path, URL, or `ARCHIVE//MEMBER`; show it with `wording.shown`."""

    @property
    def location(self) -> str:
        """The same text for the same file, from whatever folder and by whatever manifest it is named."""

    def read(self, limit: int) -> bytes:
        """The whole content; DataError if it has more than `limit` bytes."""

    def open(self) -> BinaryIO:
        """Seekable and readable; reading only a header transfers little."""

    def stamp(self) -> Stamp:
        """Asks the place, and reads nothing of the content."""


class RangedFile(PictureFile, Protocol):
    """A file of which parts can be read, such as an archive."""

    def read_range(self, start: int, length: int) -> bytes:
        """`length` bytes from `start` on; DataError if the file ends before."""


class Place(Protocol):
    """A root that names are relative to. Hashable, picklable, and cheap to make.

    Names are those of a checked row: normalised and not leading out of the root. A place looks at what it is given
    and nothing else; symbolic links under a local root are followed.
    """

    @property
    def name(self) -> str:
        """For messages: the folder's path or the URL."""

    def file(self, name: str) -> PictureFile:
        """The file of a name. Nothing is looked at yet. `ARCHIVE.tar//MEMBER` and `TABLE.parquet//ROW/COLUMN` name
        members."""

    def why_missing(self, name: str) -> str:
        """Says at which part the name leaves what there is, and the nearest name there."""


@dataclass(frozen=True, slots=True)
class HeldFile:
    """Content that is in memory already: an upload, the rows of a table, bytes read for another use."""

    name: str
    content: bytes

    @property
    def location(self) -> str:
        """See `PictureFile`."""
        return self.name

    def read(self, limit: int) -> bytes:
        """See `PictureFile`."""
        check_limit(self.name, len(self.content), limit)
        return self.content

    def open(self) -> BinaryIO:
        """See `PictureFile`."""
        return io.BytesIO(self.content)

    def read_range(self, start: int, length: int) -> bytes:
        """See `RangedFile`."""
        return whole_range(self.name, self.content[start : start + length], length)

    def stamp(self) -> Stamp:
        """Never settled: content in memory may be anything the next time."""
        return Stamp(len(self.content), "in memory", time.time_ns())


def as_file(file: PictureFile | Path) -> PictureFile:
    """Paths are local files."""
    if isinstance(file, Path):
        from qwen_edit_zero.edit_data.storage.local import LocalFile

        return LocalFile(file)
    return file


def refusal(name: str, reason: str, what: str = "picture") -> DataError:
    """The error of a file that cannot be had."""
    return DataError(f"{what} {shown(name)}: {reason}")


def recent_stamp(file: PictureFile) -> Stamp:
    """The stamp, which for an object may be a minute old: for archives, whose members would ask a thousand times."""
    recent = getattr(file, "recent_stamp", file.stamp)
    stamp: Stamp = recent()
    return stamp


def check_limit(name: str, size: int, limit: int) -> None:
    """Raises DataError if a file is larger than allowed."""
    if size > limit:
        raise refusal(name, f"it has {size:,} bytes; the limit is {limit:,}")


def whole_range(name: str, data: bytes, length: int, what: str = "picture") -> bytes:
    """The data, if it is as long as it should be. Raises DataError."""
    if len(data) != length:
        raise refusal(name, f"it ends {length - len(data):,} bytes too early: it was cut short", what)
    return data
