"""A seekable stream over ranges of a file that lies far away."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

FIRST_BYTES = 1 << 16  # enough for the header of nearly every picture
_MOST_BYTES = 1 << 23


class RangedStream(io.RawIOBase):
    """Fetches 64 KiB at first, and twice as much each time that reading goes on where it ended, up to 8 MiB.

    The first range stays in memory, since readers of pictures and archives go back to the header.

    Args:
        size: bytes of the file.
        fetch: (start, stop) -> the bytes in that range.
    """

    def __init__(self, size: int, fetch: Callable[[int, int], bytes], *, first: int = FIRST_BYTES) -> None:
        self._size, self._fetch, self._next = size, fetch, first
        self._at = 0
        self._head = b""
        self._start, self._block = 0, b""

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise ValueError(f"negative position {base + offset}")
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        wanted = min(len(buffer), self._size - self._at)
        if wanted <= 0:
            return 0
        data = self._there()
        if not data:
            self._load(wanted)
            data = self._there()
        count = min(wanted, len(data))
        buffer[:count] = data[:count]
        self._at += count
        return count

    def _there(self) -> memoryview:
        """What is in memory from the position on."""
        if self._at < len(self._head):
            return memoryview(self._head)[self._at :]
        if self._start <= self._at < self._start + len(self._block):
            return memoryview(self._block)[self._at - self._start :]
        return memoryview(b"")

    def _load(self, wanted: int) -> None:
        stop = min(self._size, self._at + max(self._next, min(wanted, _MOST_BYTES)))
        block = self._fetch(self._at, stop)
        self._next = min(2 * self._next, _MOST_BYTES)
        if not self._head and self._at == 0:
            self._head = block
        else:
            self._start, self._block = self._at, block
