"""Files written by `torch.save`: a zip archive of one pickle and the raw bytes of each storage, never compressed.

Nothing but the pickle is read here; tensors come out as the places of their bytes. Imports no torch.
Layout: `NAME/data.pkl`, `NAME/data/KEY` for each storage, `NAME/byteorder`
(https://github.com/pytorch/pytorch/blob/main/docs/source/notes/serialization.rst).
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_edit_zero.checkpoints.foreign.pickles import PickledTensor, load_pickle
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.safetensors_file import ITEM_SIZE, element_count

_LOCAL_HEADER = struct.Struct("<4s5H3I2H")
_MOST_PICKLE = 2**30  # bytes; larger ones are no description of tensors


@dataclass(frozen=True, slots=True)
class StoredBytes:
    """`size` bytes at `offset` of a file, with the CRC-32 the archive has of them (None if it has none)."""

    path: Path
    offset: int
    size: int
    crc32: int | None


@dataclass(frozen=True)
class TorchFile:
    """`value` is what was saved, tensors as PickledTensor; `storages` says where their bytes are."""

    path: Path
    value: Any
    storages: Mapping[str, StoredBytes]

    def storage_of(self, tensor: PickledTensor, label: str) -> StoredBytes:
        """Where the bytes of a tensor lie, after checking that they hold all its elements. Raises CheckpointError."""
        stored = self.storages.get(tensor.storage.key)
        if stored is None:
            raise CheckpointError(f"{self.path} misses the bytes of {label} (its record data/{tensor.storage.key})")
        if tensor.dtype not in ITEM_SIZE:
            raise CheckpointError(f"{self.path}: {label} has an element type that is not known here")
        if 0 not in tensor.shape:
            last = tensor.first + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
            if (
                tensor.first < 0
                or min(tensor.strides, default=0) < 0
                or (last + 1) * ITEM_SIZE[tensor.dtype] > stored.size
            ):
                raise CheckpointError(
                    f"{self.path}: {label} of shape {list(tensor.shape)} does not fit into its record of {stored.size} "
                    "bytes"
                )
        return stored


class _Window(io.RawIOBase):
    """A stretch of a file as a file of its own, for zipfile."""

    def __init__(self, fd: int, start: int, size: int) -> None:
        self._fd, self._start, self._size, self._at = fd, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        if base + offset < 0:
            raise OSError("seek before the start")
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        data = os.pread(self._fd, left if size < 0 else min(size, left), self._start + self._at)
        self._at += len(data)
        return data


def read_torch_file(path: Path, offset: int = 0, size: int | None = None) -> TorchFile:
    """The description of a file written by torch.save, or of one that is a stretch of another file.

    Raises CheckpointError naming the file if it is missing, empty, cut short, of the old format or damaged.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    try:
        end = os.fstat(fd).st_size
        length = end - offset if size is None else size
        if end == 0:
            raise CheckpointError(f"{path} has 0 bytes: it was never written, or lost when the power failed")
        if offset < 0 or length < 0 or offset + length > end:
            raise CheckpointError(f"{path} is cut short: it has {end} bytes and should have {offset + length} or more")
        return _read(path, fd, offset, length)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror or error}") from None
    finally:
        os.close(fd)


def _read(path: Path, fd: int, start: int, length: int) -> TorchFile:
    try:
        entries = {info.filename: info for info in zipfile.ZipFile(_Window(fd, start, length)).infolist()}
    except Exception as error:  # a damaged directory can fail in any way
        beginning = os.pread(fd, 2, start)
        if beginning[:1] == b"\x80":
            raise CheckpointError(
                f"{path} is in torch's old file format (before 1.6), which is not read here; load it with torch and "
                "save it again"
            ) from None
        if beginning == b"PK":
            raise CheckpointError(f"{path} is cut short or damaged: its zip directory cannot be read") from None
        raise CheckpointError(f"{path} is no file written by torch.save ({error})") from None
    pickles = [name for name in entries if name.endswith("/data.pkl") and name.count("/") == 1]
    if len(pickles) != 1:
        raise CheckpointError(f"{path} is a zip archive, but not one written by torch.save (no data.pkl)")
    prefix = pickles[0].removesuffix("data.pkl")
    records = {name: _record(path, fd, start, length, info) for name, info in entries.items()}
    byteorder = records.get(f"{prefix}byteorder")
    if byteorder is not None and _content(fd, byteorder) != b"little":
        raise CheckpointError(f"{path} was written on a big-endian machine; only little-endian files are read here")
    head = f"{prefix}data/"
    storages = {name.removeprefix(head): record for name, record in records.items() if name.startswith(head)}
    try:
        return TorchFile(path, load_pickle(_content(fd, records[pickles[0]])), storages)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None


def _record(path: Path, fd: int, start: int, length: int, info: zipfile.ZipInfo) -> StoredBytes:
    if info.compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"{path}: {info.filename} is compressed, which torch.save never does")
    offset = _data_offset(path, fd, start, info)
    if offset + info.file_size > length:
        raise CheckpointError(f"{path}: {info.filename} reaches beyond the end of the file; it is cut short or damaged")
    return StoredBytes(path, start + offset, info.file_size, info.CRC or None)


def _content(fd: int, record: StoredBytes) -> bytes:
    if record.size > _MOST_PICKLE:
        raise CheckpointError(f"its description of tensors has {record.size} bytes, which is too much to be one")
    content = os.pread(fd, record.size, record.offset)
    if len(content) != record.size or zlib.crc32(content) != (record.crc32 or zlib.crc32(content)):
        raise CheckpointError("it is damaged: its description of tensors does not match its CRC-32")
    return content


def _data_offset(path: Path, fd: int, start: int, info: zipfile.ZipInfo) -> int:
    header = os.pread(fd, _LOCAL_HEADER.size, start + info.header_offset)
    fields = _LOCAL_HEADER.unpack(header) if len(header) == _LOCAL_HEADER.size else (b"",)
    if fields[0] != b"PK\x03\x04":
        raise CheckpointError(f"{path} is damaged: the header of {info.filename} is not where its zip directory says")
    return info.header_offset + _LOCAL_HEADER.size + int(fields[-2]) + int(fields[-1])


def is_contiguous(tensor: PickledTensor) -> bool:
    """Whether its elements lie in row-major order without holes."""
    step = 1
    for n, stride in reversed(list(zip(tensor.shape, tensor.strides, strict=True))):
        if n != 1 and stride != step:
            return element_count(tensor.shape) == 0
        step *= n
    return True
