"""Objects of stores as files, and folders of them as places."""

from __future__ import annotations

import functools
import io
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, TypeVar, cast

from qwen_edit_zero.edit_data.storage.files import PictureFile, RangedFile, Stamp, check_limit, whole_range
from qwen_edit_zero.edit_data.storage.local import LocalFile
from qwen_edit_zero.edit_data.storage.names import resolve, why_not_there
from qwen_edit_zero.edit_data.storage.object_cache import ObjectCache
from qwen_edit_zero.edit_data.storage.options import DEFAULTS, StorageOptions
from qwen_edit_zero.edit_data.storage.ranged import RangedStream
from qwen_edit_zero.edit_data.storage.store import ObjectChangedError, Store, Target, store_of
from qwen_edit_zero.edit_data.wording import nearest, shown
from qwen_edit_zero.errors import DataError, StorageError

T = TypeVar("T")

_MOST_LISTED = 500  # names of a folder looked at for the nearest one: what one request gives


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """An object by the URL of a folder and a name under it; see `PictureFile` and `RangedFile`."""

    root: str
    file: str
    options: StorageOptions = DEFAULTS
    what: str = "picture"

    @property
    def name(self) -> str:
        """See `PictureFile`."""
        return f"{self.root.rstrip('/')}/{self.file}" if self.file else self.root

    @property
    def location(self) -> str:
        """See `PictureFile`."""
        return self.name

    def read(self, limit: int) -> bytes:
        """See `PictureFile`."""
        return self._steady(lambda store, target, stamp: self._read(store, target, stamp, limit))

    def read_range(self, start: int, length: int) -> bytes:
        """See `RangedFile`."""

        def read(store: Store, target: Target, stamp: Stamp) -> bytes:
            if start + length > stamp.size:
                return whole_range(self.name, b"\0" * max(0, stamp.size - start), length, self.what)
            return store.fetch(target, start, start + length)

        return self._steady(read)

    def open(self) -> BinaryIO:
        """See `PictureFile`."""
        return self._steady(self._open)

    def stamp(self) -> Stamp:
        """See `PictureFile`."""
        store = store_of(self.root, self.options)
        return store.stamp(store.target(self.root, self.file, self.what))

    def recent_stamp(self) -> Stamp:
        """As `stamp`, or what it was within the last minute."""
        store = store_of(self.root, self.options)
        return store.recent_stamp(store.target(self.root, self.file, self.what))

    def _read(self, store: Store, target: Target, stamp: Stamp, limit: int) -> bytes:
        check_limit(self.name, stamp.size, limit)
        kept = _cache_of(self.options)
        content = kept.get(self.location, stamp) if kept else None
        if content is None:
            content = store.fetch(target, 0, stamp.size)
            if kept:
                kept.put(self.location, stamp, content)
        return content

    def _open(self, store: Store, target: Target, stamp: Stamp) -> BinaryIO:
        kept = _cache_of(self.options)
        content = kept.get(self.location, stamp) if kept else None
        if content is not None:
            return io.BytesIO(content)

        def fetch(start: int, stop: int) -> bytes:
            try:
                return store.fetch(target, start, stop)
            except ObjectChangedError:
                raise _changing(target) from None

        return cast(BinaryIO, io.BufferedReader(RangedStream(stamp.size, fetch), 1 << 13))

    def _steady(self, use: Callable[[Store, Target, Stamp], T]) -> T:
        """Use the object, asking about it again if it was replaced meanwhile."""
        store = store_of(self.root, self.options)
        target = store.target(self.root, self.file, self.what)
        for _ in range(3):
            try:
                return use(store, target, store.recent_stamp(target))
            except ObjectChangedError:
                continue
        raise _changing(target)


@dataclass(frozen=True, slots=True)
class RemotePlace:
    """A folder of a store; see `Place`."""

    root: str
    options: StorageOptions = DEFAULTS

    @property
    def name(self) -> str:
        """See `Place`."""
        return self.root

    def file(self, name: str) -> PictureFile:
        """See `Place`."""
        if "//" in name or name.startswith("/"):
            return resolve(name, self)
        return RemoteFile(self.root, name, self.options)

    def plain(self, name: str, what: str) -> RangedFile:
        """The file of a name that names no member and is no URL."""
        if name.startswith("/"):  # in a folder that data.outside allows
            return LocalFile(Path(name), what)
        return RemoteFile(self.root, name, self.options, what)

    def why_missing(self, name: str) -> str:
        """See `Place`; looks at up to 500 names of a folder."""
        if "//" in name or name.startswith("/"):
            return why_not_there(name, self)
        folder, _, last = name.rpartition("/")
        store = store_of(self.root, self.options)
        target = store.target(self.root, folder)
        try:
            found = store.listed(target, most=_MOST_LISTED, prefix=last[:2])
            found = found or store.listed(target, most=_MOST_LISTED)
        except DataError:
            return f"what is under {shown(target.url)} may not be listed"
        if not found:
            return f"there is nothing under {shown(target.url)}"
        near = nearest(last, (entry.name for entry in found))
        if near is None:
            return f"{shown(target.url)} has no {shown(last)} and nothing like it"
        return f"{shown(target.url)} has no {shown(last)}; the nearest name there is {shown(near)}"


def _changing(target: Target) -> StorageError:
    return StorageError(
        f"{target.what} {shown(target.url)} was replaced while it was read; start again when the data is complete"
    )


@functools.lru_cache(maxsize=8)
def _made_cache(folder: Path, limit: int, process: int) -> ObjectCache:
    return ObjectCache(folder, limit)


_cache_lock = threading.Lock()


def _after_fork() -> None:
    global _cache_lock
    _cache_lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)


def _cache_of(options: StorageOptions) -> ObjectCache | None:
    if options.cache_dir is None:
        return None
    with _cache_lock:
        return _made_cache(options.cache_dir, options.cache_bytes, os.getpid())
