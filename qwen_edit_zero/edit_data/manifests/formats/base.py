"""What every reader of a format offers, and the folder it reads from."""

from __future__ import annotations

import os
import stat
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol

import xxhash

from qwen_edit_zero.edit_data.manifests.names import RowError
from qwen_edit_zero.edit_data.manifests.rows import OWN_NAMES
from qwen_edit_zero.edit_data.wording import nearest, shown
from qwen_edit_zero.errors import DataError

Progress = Callable[[int, int], None]
Content = bytes | Mapping[str, Any] | RowError

_LEFT_ALONE = ("Thumbs.db", "desktop.ini")


def is_left_alone(name: str) -> bool:
    """Whether it is what file managers leave beside pictures, or hidden."""
    return name.startswith(".") or name in _LEFT_ALONE


class Entry(NamedTuple):
    """A name in a folder."""

    name: str
    is_folder: bool


class Folder(Protocol):
    """The folder that a manifest lies in, local or on a store. Names are relative to it, or absolute."""

    @property
    def location(self) -> str:
        """Its path or URL, for messages and for absolute names."""

    def entries(self, name: str = "") -> list[Entry]:
        """What a folder in it holds, sorted, without names that begin with a dot. Raises DataError if it is none."""

    def open(self, name: str) -> BinaryIO:
        """A file in it, seekable. Raises DataError if it cannot be read."""

    def size(self, name: str) -> int:
        """Bytes of a file. Raises DataError if it cannot be read."""

    def stamp(self, name: str) -> str:
        """Text that changes whenever the content of a file may have. Raises DataError if it cannot be read."""

    def content_key(self, name: str, on_progress: Progress) -> str:
        """Text that changes whenever the content of a file does; of a local one only then, wherever it lies."""

    def is_file(self, name: str) -> bool:
        """Whether there is such a file."""

    def is_folder(self, name: str) -> bool:
        """Whether there is such a folder."""


class LocalFolder:
    """A folder of the file system."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @property
    def location(self) -> str:
        return os.path.abspath(self._path)

    def entries(self, name: str = "") -> list[Entry]:
        try:
            with os.scandir(self._path / name) as found:
                entries = [Entry(e.name, e.is_dir()) for e in found if not is_left_alone(e.name)]
        except OSError as error:
            raise DataError(f"folder {shown(self._path / name)}: it cannot be listed ({_why(error)})") from error
        return sorted(entries)

    def open(self, name: str) -> BinaryIO:
        self.size(name)
        try:
            return (self._path / name).open("rb")
        except OSError as error:
            raise self._unreadable(name, error) from error

    def size(self, name: str) -> int:
        try:
            status = (self._path / name).stat()
        except OSError as error:
            raise self._unreadable(name, error) from error
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise DataError(f"manifest {shown(self._path / name)}: it is not a regular file")
        return status.st_size

    def stamp(self, name: str) -> str:
        try:
            status = (self._path / name).stat()
        except OSError as error:
            raise self._unreadable(name, error) from error
        return f"{status.st_size}-{status.st_mtime_ns}-{status.st_ctime_ns}-{status.st_ino}"

    def content_key(self, name: str, on_progress: Progress) -> str:
        return bytes_key(self, name, on_progress)

    def is_file(self, name: str) -> bool:
        return (self._path / name).is_file()

    def is_folder(self, name: str) -> bool:
        return (self._path / name).is_dir()

    def _unreadable(self, name: str, error: OSError) -> DataError:
        path = self._path / name
        if isinstance(error, FileNotFoundError):
            try:
                near = nearest(path.name, os.listdir(path.parent))
            except OSError:
                return DataError(f"manifest {shown(path)}: there is no such file, nor its folder {shown(path.parent)}")
            hint = f"; the nearest name there is {shown(near)}" if near else ""
            return DataError(f"manifest {shown(path)}: there is no such file{hint}")
        return DataError(f"manifest {shown(path)}: it cannot be read ({_why(error)})")


class Reader(ABC):
    """Reads the rows of one manifest, once.

    Attributes:
        title: what it is called in the line that reports it, such as "DiffSynth metadata.csv".
        unit: what its rows are numbered by.
        called: the user's name for each key of ours, for messages.
        lines: the number of the last row read, used or not.
        given_notes: what should be told and is known from the beginning.
        notes: what should be told besides, complete when all has been read.
        uses_columns: whether the reader goes by `data.columns`.
        places: name and first number of each file, where the rows of several files are counted through.
        done, total: bytes read, and of all.
    """

    title: str
    unit = "line"
    called: Mapping[str, str] = OWN_NAMES
    uses_columns = False

    def __init__(self) -> None:
        self.lines = 0
        self.given_notes: list[str] = []
        self.notes: list[str] = []
        self.places: list[tuple[str, int]] = []
        self.done = 0
        self.total = 0

    @abstractmethod
    def records(self) -> Iterator[tuple[int, Content]]:
        """Number and content of each row: JSON of ours as bytes, values under our keys, or what is wrong with it."""

    @abstractmethod
    def content_key(self, on_progress: Progress) -> str:
        """Text that changes whenever the rows may have."""


def bytes_key(folder: Folder, name: str, on_progress: Progress) -> str:
    """Size and XXH3-128 of a file's bytes."""
    total, done = folder.size(name), 0
    digest = xxhash.xxh3_128()
    with folder.open(name) as file:
        while block := read_block(file, folder, name, 1 << 22):
            digest.update(block)
            done += len(block)
            on_progress(done, total)
    return f"{done}-{digest.hexdigest()}"


def stamps_key(folder: Folder, names: Iterable[str]) -> str:
    """XXH3-128 of files' names and stamps: for archives, whose bytes are too many to be read for this."""
    digest = xxhash.xxh3_128()
    for name in names:
        digest.update(f"{name}\0{folder.stamp(name)}\0".encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def read_block(file: BinaryIO, folder: Folder, name: str, size: int) -> bytes:
    """The next bytes of an open file of the folder. Raises DataError naming it."""
    try:
        return file.read(size)
    except OSError as error:
        raise DataError(f"manifest {shown(name_of(folder, name))}: it cannot be read ({_why(error)})") from error


def name_of(folder: Folder, name: str) -> str:
    """A file of a folder as messages call it."""
    return name if name.startswith("/") or "://" in name else f"{folder.location.rstrip('/')}/{name}"


def _why(error: OSError) -> str:
    return error.strerror or str(error)
