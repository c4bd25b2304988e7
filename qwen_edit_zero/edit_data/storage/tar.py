"""Members of tar archives, read in place: an index of offsets is made once for each archive."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import tarfile
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from qwen_edit_zero.edit_data.arrays import mapped_array
from qwen_edit_zero.edit_data.storage.files import (
    NotThereError,
    RangedFile,
    Stamp,
    check_limit,
    recent_stamp,
    refusal,
)
from qwen_edit_zero.edit_data.storage.ranged import RangedStream
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError

_FORMAT = 1
_ROW = np.dtype([("name", "<u8"), ("offset", "<i8"), ("size", "<i8")])  # name: XXH3-64, sorted by it
_BEHIND = 20 << 10  # bytes looked at behind an archive's end, which is filled up with zeros to 10 KiB
_HELD = 256  # indexes in memory or mapped

_Rows = npt.NDArray[np.void]


class TarEntry(NamedTuple):
    """A regular file in an archive: where its bytes lie."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class TarMember:
    """A file in a tar archive, read from the place where it lies; see `PictureFile`."""

    archive: RangedFile
    member: str
    index_dir: Path | None = None

    @property
    def name(self) -> str:
        """See `PictureFile`."""
        return f"{self.archive.name}//{self.member}"

    @property
    def location(self) -> str:
        """See `PictureFile`."""
        return f"{self.archive.location}//{self.member}"

    def read(self, limit: int) -> bytes:
        """See `PictureFile`."""
        offset, size, _ = self._found()
        check_limit(self.name, size, limit)
        return self.archive.read_range(offset, size)

    def open(self) -> BinaryIO:
        """See `PictureFile`."""
        offset, size, _ = self._found()
        stream = RangedStream(size, lambda start, stop: self.archive.read_range(offset + start, stop - start))
        return io.BufferedReader(stream)

    def stamp(self) -> Stamp:
        """The archive's stamp and the place in it."""
        offset, size, archive = self._found()
        return Stamp(size, f"{archive.size}-{archive.version}-{offset}", archive.changed_ns)

    def _found(self) -> tuple[int, int, Stamp]:
        stamp = recent_stamp(self.archive)
        place = _index(self.archive, stamp, self.index_dir).find(self.member)
        if place is None:
            raise NotThereError(
                f"picture {shown(self.name)}: archive {shown(self.archive.name)} holds no {shown(self.member)}"
            )
        return (*place, stamp)


class _Index:
    """Places of an archive's members, by hashes of their names."""

    def __init__(self, rows: _Rows) -> None:
        self._rows, self._names = rows, rows["name"]

    def find(self, name: str) -> tuple[int, int] | None:
        """(offset, size), or None."""
        key = np.uint64(_hash(name))
        at = int(np.searchsorted(self._names, key))
        if at == len(self._rows) or self._names[at] != key:
            return None
        return int(self._rows[at]["offset"]), int(self._rows[at]["size"])


_indexes: OrderedDict[tuple[str, Stamp], _Index | DataError] = OrderedDict()
_making: dict[tuple[str, Stamp], threading.Lock] = {}
_lock = threading.Lock()


def _after_fork() -> None:
    global _lock, _making
    _lock, _making = threading.Lock(), {}


os.register_at_fork(after_in_child=_after_fork)


def _index(archive: RangedFile, stamp: Stamp, folder: Path | None) -> _Index:
    """The index of an archive: from memory, from its file, or made now by reading all headers.

    Raises DataError if it is damaged, which is found out once for all of its members.
    """
    key = (archive.location, stamp)
    with _lock:
        if (found := _indexes.get(key)) is not None:
            _indexes.move_to_end(key)
            return _usable(found)
        making = _making.setdefault(key, threading.Lock())
    with making:  # threads that want one archive wait for the first of them
        with _lock:
            if (found := _indexes.get(key)) is not None:
                return _usable(found)
        path = _path(folder, archive, stamp)
        rows = _load(path)
        index: _Index | DataError
        try:
            if rows is None:
                rows = _made(archive)
                _save(path, rows)
            index = _Index(rows)
        except DataError as error:
            index = DataError(str(error))  # without the frames that the error holds
        with _lock:
            _indexes[key] = index
            _making.pop(key, None)
            while len(_indexes) > _HELD:
                _indexes.popitem(last=False)
        return _usable(index)


def _usable(index: _Index | DataError) -> _Index:
    if isinstance(index, DataError):
        raise DataError(str(index))
    return index


def tar_entries(stream: BinaryIO, name: str) -> Iterator[TarEntry]:
    """The regular files of an archive in order; of two with one name, the last is the one that counts.

    Args:
        name: of the archive, for messages.

    Raises:
        DataError: it is compressed, no tar archive, damaged, or cut short.
    """
    try:
        size = stream.seek(0, io.SEEK_END)
        stream.seek(0)
        _check_plain(stream.read(6), name)
        stream.seek(0)
        with tarfile.open(fileobj=stream, mode="r:", errorlevel=1) as archive:
            while (info := archive.next()) is not None:
                archive.members = []  # type: ignore[attr-defined]  # or it keeps every header
                if info.isreg() and not info.issparse():
                    if info.offset_data + info.size > size:
                        raise refusal(name, f"it was cut short: {shown(info.name)} goes on behind its end", "archive")
                    yield TarEntry(info.name, info.offset_data, info.size)
            end = archive.offset
        _check_end(stream, end, name)
    except tarfile.TarError as error:
        raise refusal(name, f"it is no tar archive that can be read ({error})", "archive") from error


def _check_end(stream: BinaryIO, end: int, name: str) -> None:
    """Refuse an archive that has more, or should have, behind what tarfile takes for its end without a word."""
    stream.seek(end)
    behind = stream.read(_BEHIND)
    if behind[:512].strip(b"\0"):
        raise refusal(name, f"its header at byte {end:,} is damaged, or the archive was cut short", "archive")
    if not behind:
        raise refusal(
            name,
            "it was cut short or never closed: it does not end with zeros, as archives do. If nothing is missing, "
            "`head -c 1024 /dev/zero >> ARCHIVE` ends it",
            "archive",
        )
    if behind.strip(b"\0"):
        raise refusal(
            name,
            f"there is more behind its end at byte {end:,}, as where archives were put together with cat; put them "
            "together with tar --concatenate, or use them one by one",
            "archive",
        )


def _check_plain(head: bytes, name: str) -> None:
    for start, kind in ((b"\x1f\x8b", "gzip"), (b"BZh", "bzip2"), (b"\xfd7zXZ", "xz"), (b"\x28\xb5\x2f\xfd", "zstd")):
        if head.startswith(start):
            raise refusal(
                name, f"it is compressed ({kind}), so members cannot be read by themselves; uncompress it", "archive"
            )


def _made(archive: RangedFile) -> _Rows:
    with archive.open() as stream:
        places = {entry.name: (entry.offset, entry.size) for entry in tar_entries(stream, archive.name)}
    rows = np.array([(_hash(name), *place) for name, place in places.items()], dtype=_ROW)
    rows.sort(order="name")
    if len(rows) > 1 and bool((rows["name"][1:] == rows["name"][:-1]).any()):
        raise refusal(archive.name, "two of its names have one XXH3-64 hash; rename one of them", "archive")
    return rows


def _hash(name: str) -> int:
    return xxhash.xxh3_64_intdigest(name.encode("utf-8", "surrogateescape"))


def _path(folder: Path | None, archive: RangedFile, stamp: Stamp) -> Path | None:
    if folder is None or not stamp.is_settled():
        return None
    named = f"{_FORMAT}\0{archive.location}\0{stamp.size}\0{stamp.version}".encode("utf-8", "surrogateescape")
    return folder / f"{hashlib.blake2b(named, digest_size=16).hexdigest()}.npy"


def _load(path: Path | None) -> _Rows | None:
    if path is None:
        return None
    try:
        rows = mapped_array(path)
    except (OSError, ValueError):
        return None
    return rows if rows.dtype == _ROW and rows.ndim == 1 else None


def _save(path: Path | None, rows: _Rows) -> None:
    """Keep the index for other processes. One that cannot be kept is made by each of them."""
    if path is None:
        return
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                np.save(file, rows)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
