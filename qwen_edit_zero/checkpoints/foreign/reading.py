"""Reading ranges of tensors out of their blocks, from several threads, with every byte compared with its CRC-32."""

from __future__ import annotations

import errno
import os
import threading
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from qwen_edit_zero.checkpoints.foreign.blocks import Block, Runs, Shape
from qwen_edit_zero.checkpoints.foreign.crc import combine
from qwen_edit_zero.checkpoints.foreign.torch_files import StoredBytes
from qwen_edit_zero.checkpoints.precision import Bytes
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.safetensors_file import element_count

_MOST_OPEN = 512
_SMALL_RUN = 4096  # bytes; shorter runs are gathered from a mapping instead of being read one by one
_PIECE = 4 * 2**20


class BlockReader:
    """Positional reads. Threads may share it. Keeps files open, no data."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fds: dict[Path, int] = {}
        self._seen: dict[StoredBytes, list[tuple[int, int, int]]] = {}  # begin, end, CRC-32 of the bytes read

    def read_into(self, blocks: Sequence[Block], shape: Shape, start: int, item: int, target: Bytes) -> None:
        """Fill `target` with the elements from `start` on, of a tensor that `blocks` cover; `item` bytes each.

        Raises CheckpointError naming the file if it cannot be read.
        """
        end = start + len(target) // item
        for block in blocks:
            if block.count == 0 or not _may_meet(block, shape, start, end):
                continue
            runs = Runs(block, shape)
            low, high = runs.within(start, end)
            if low >= high:
                continue
            if runs.length * item < _SMALL_RUN and high - low > 1:
                self._gather(block, runs, low, high, start, item, target)
                continue
            for begin, first in zip(*(places.tolist() for places in runs.places(low, high)), strict=True):
                skip = max(0, start - begin)
                take = min(runs.length, end - begin) - skip
                at = (begin + skip - start) * item
                self.read_bytes(block.stored, (first + skip) * item, target[at : at + take * item])

    def read_bytes(self, stored: StoredBytes, offset: int, target: Bytes) -> None:
        """Fill `target` from byte `offset` of a record on, remembering the CRC-32 of what was read."""
        for done in range(0, len(target), _PIECE):
            part = target[done : done + _PIECE]
            self._pread(stored.path, stored.offset + offset + done, part)
            if stored.crc32 is not None:
                piece = (offset + done, offset + done + len(part), zlib.crc32(part.data))
                with self._lock:
                    self._seen.setdefault(stored, []).append(piece)

    def peek(self, stored: StoredBytes, offset: int, size: int) -> Bytes:
        """`size` bytes from byte `offset` of a record on, not counted as read. Raises CheckpointError."""
        target = np.empty(size, dtype=np.uint8)
        self._pread(stored.path, stored.offset + offset, target)
        return target

    def revisit(self, records: Iterable[StoredBytes]) -> None:
        """Count records as read from, without a CRC-32 of what was read."""
        with self._lock:
            for stored in records:
                if stored.crc32 is not None:
                    self._seen.setdefault(stored, [])

    @property
    def bytes_to_compare(self) -> int:
        """Size of all records that `finish` would compare."""
        return sum(stored.size for stored in self._seen)

    def finish(self) -> None:
        """Compare every record of which something was read with its CRC-32; what was not read of it is read now.

        Raises CheckpointError naming the first damaged file.
        """
        for _, fault in self.compare():
            if fault is not None:
                raise CheckpointError(f"{fault}. Use another checkpoint or a backup")

    def compare(self) -> Iterator[tuple[StoredBytes, str | None]]:
        """The same, telling of each record what is wrong with it, if something is."""
        for stored in list(self._seen):
            position, crc = 0, 0
            for begin, end, part in sorted(self._seen.pop(stored)):
                if begin < position:  # read twice; only its end, if anything, is new
                    if end > position:
                        crc = self._continue(stored, position, end, crc)
                        position = end
                    continue
                crc = self._continue(stored, position, begin, crc)
                crc = combine(crc, part, end - begin)
                position = end
            crc = self._continue(stored, position, stored.size, crc)
            self._seen.pop(stored, None)
            fault = f"{stored.path} is damaged: the {stored.size} bytes at {stored.offset} do not match their CRC-32"
            yield stored, None if crc == stored.crc32 else fault

    def close(self) -> None:
        """Close all files. Idempotent; a later read opens them again."""
        with self._lock:
            while self._fds:
                os.close(self._fds.popitem()[1])

    def _continue(self, stored: StoredBytes, begin: int, end: int, crc: int) -> int:
        for at in range(begin, end, _PIECE):
            part = np.empty(min(_PIECE, end - at), dtype=np.uint8)
            self._pread(stored.path, stored.offset + at, part)
            crc = zlib.crc32(part.data, crc)
        return crc

    def _gather(self, block: Block, runs: Runs, low: int, high: int, start: int, item: int, target: Bytes) -> None:
        """Many short runs: the bytes they are spread over are mapped, so that only pages that hold some are read."""
        stored, length = block.stored, runs.length
        try:
            mapped = np.memmap(stored.path, dtype=np.uint8, mode="r", offset=stored.offset, shape=(stored.size,))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {stored.path}: {error}") from None
        source = mapped[: stored.size // item * item].reshape(-1, item)
        wanted = target.reshape(-1, item)
        within = np.arange(length, dtype=np.int64)
        for begin in range(low, high, max(1, 2**16 // length)):
            starts, firsts = runs.places(begin, min(high, begin + max(1, 2**16 // length)))
            to = (starts[:, None] + within).reshape(-1) - start
            taken = (firsts[:, None] + within).reshape(-1)
            inside = (to >= 0) & (to < len(wanted))
            wanted[to[inside]] = source[taken[inside]]
        self.revisit([stored])

    def _pread(self, path: Path, offset: int, target: Bytes) -> None:
        view = target.data
        try:
            fd, is_kept = self._open(path)
            try:
                while len(view):
                    count = os.preadv(fd, [view], offset)
                    if count == 0:
                        raise OSError(errno.EIO, f"the file ends at byte {offset}")
                    view, offset = view[count:], offset + count
            finally:
                if not is_kept:
                    os.close(fd)
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}. Use another checkpoint or a backup") from None

    def _open(self, path: Path) -> tuple[int, bool]:
        with self._lock:
            if path in self._fds:
                return self._fds[path], True
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            if len(self._fds) >= _MOST_OPEN:  # another thread may be reading any of those
                return fd, False
            self._fds[path] = fd
            return fd, True


def _may_meet(block: Block, shape: Shape, start: int, end: int) -> bool:
    """Whether the rows of the first dimension that a block lies in meet elements `start .. end`; cheap."""
    if not shape:
        return True
    row = element_count(shape[1:])
    return block.corner[0] * row < end and (block.corner[0] + block.sizes[0]) * row > start
