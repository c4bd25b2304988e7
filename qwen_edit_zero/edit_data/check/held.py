"""Bytes of pictures that were just read, kept for a moment: a file is read once, to digest it and to decode it."""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import replace
from typing import BinaryIO

from qwen_edit_zero.edit_data.manifests.samples import Sample
from qwen_edit_zero.edit_data.manifests.table import SampleTable
from qwen_edit_zero.edit_data.storage.files import PictureFile, Place, Stamp


class Held:
    """Contents by location, up to a number of bytes; the oldest are let go. Safe in several threads."""

    def __init__(self, most_bytes: int) -> None:
        self._most, self._bytes = most_bytes, 0
        self._contents: OrderedDict[str, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, location: str) -> bytes | None:
        """The content of a file, if it is still here."""
        with self._lock:
            return self._contents.get(location)

    def put(self, location: str, content: bytes) -> None:
        """Keep a content."""
        with self._lock:
            if location not in self._contents:
                self._contents[location] = content
                self._bytes += len(content)
            while self._bytes > self._most and len(self._contents) > 1:
                _, gone = self._contents.popitem(last=False)
                self._bytes -= len(gone)

    def clear(self) -> None:
        """Let all go: what is read from now on is what the files hold from now on."""
        with self._lock:
            self._contents.clear()
            self._bytes = 0


class HeldTable:
    """A table whose samples' pictures are read through `Held`; what a survey needs of it."""

    def __init__(self, table: SampleTable, held: Held) -> None:
        self._table, self._held = table, held

    def __len__(self) -> int:
        return len(self._table)

    def __getitem__(self, index: int, /) -> Sample:
        sample = self._table[index]
        return replace(sample, place=_HeldPlace(sample.place, self._held))


class _HeldPlace:
    """A place; see `Place`."""

    def __init__(self, place: Place, held: Held) -> None:
        self._place, self._held = place, held

    @property
    def name(self) -> str:
        return self._place.name

    def file(self, name: str) -> PictureFile:
        return _HeldReads(self._place.file(name), self._held)

    def why_missing(self, name: str) -> str:
        return self._place.why_missing(name)


class _HeldReads:
    """A file; see `PictureFile`."""

    def __init__(self, file: PictureFile, held: Held) -> None:
        self._file, self._held = file, held

    @property
    def name(self) -> str:
        return self._file.name

    @property
    def location(self) -> str:
        return self._file.location

    def read(self, limit: int) -> bytes:
        content = self._held.get(self.location)
        if content is None:
            content = self._file.read(limit)
            self._held.put(self.location, content)
        return content

    def open(self) -> BinaryIO:
        return self._file.open()

    def stamp(self) -> Stamp:
        return self._file.stamp()
