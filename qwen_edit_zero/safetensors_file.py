"""The safetensors container: its header read and checked, or built before the first tensor is. Imports no torch.

Layout (https://github.com/huggingface/safetensors#format): 8 bytes little-endian header length N, N bytes of JSON
`{"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets": [begin, end]}}`, then the data, to which the
offsets are relative and which has no holes.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from qwen_edit_zero.errors import ModelFolderError

ITEM_SIZE = {  # bytes
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
MAX_HEADER = 100_000_000  # bytes; the limit of the reference implementation


def element_count(shape: Iterable[int]) -> int:
    """Elements of a tensor of this shape; 1 for a 0-d one."""
    return math.prod(shape)


def build_header(tensors: Iterable[tuple[str, str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """The bytes before the data (length field included) of a file with these (name, dtype, shape), in this order.

    The metadata comes first, so that the beginning of a file tells where it belongs; the length is padded with
    spaces to a multiple of 8.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    position = 0
    for name, dtype, shape in tensors:
        size = element_count(shape) * ITEM_SIZE[dtype]
        assert name not in header, f"{name} twice in one file"
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    assert len(text) <= MAX_HEADER, f"a header of {len(text)} bytes is above the format's limit"
    return struct.pack("<Q", len(text)) + text


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a safetensors file.

    Attributes:
        path: the file.
        dtype: the format's name of the element type (`BF16`).
        shape: `()` for a 0-d tensor.
        offset: position of the first byte in the file.
        nbytes: length in bytes.
    """

    path: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_header(path: Path) -> dict[str, StoredTensor]:
    """Tensors of the file by name, after checking that the file is a whole safetensors file.

    Raises ModelFolderError for anything else: a pickle, a Git LFS pointer, a truncated or damaged file.
    """
    try:
        size = path.stat().st_size
        with open(path, "rb") as f:
            start = f.read(256)
            _refuse_other_formats(path, start, size)
            length = int.from_bytes(start[:8], "little")
            if not 2 <= length <= min(size - 8, MAX_HEADER):
                raise ModelFolderError(
                    f"{path} is no whole safetensors file: its first 8 bytes promise a header of {length} bytes but "
                    f"the file has {size}. It is damaged or cut off; copy or download it again"
                )
            f.seek(8)
            text = f.read(length)
    except OSError as error:
        raise ModelFolderError(f"{path} cannot be read: {os.strerror(error.errno or 0)}") from error
    try:
        entries = json.loads(text)
        tensors = {name: _entry(path, e, 8 + length) for name, e in entries.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        message = f"{path}: its safetensors header is damaged ({error}); copy or download it again"
        raise ModelFolderError(message) from error
    _check_extent(path, tensors, size, 8 + length)
    return tensors


def _entry(path: Path, entry: Mapping[str, object], data_start: int) -> StoredTensor:
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not (isinstance(dtype, str) and isinstance(shape, list) and isinstance(offsets, list) and len(offsets) == 2):
        raise ValueError(f"malformed entry {entry!r}")
    if dtype not in ITEM_SIZE:
        raise ValueError(f"unknown element type {dtype!r}")
    begin, end = offsets
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
        raise ValueError(f"malformed entry {entry!r}")
    if end - begin != element_count(shape) * ITEM_SIZE[dtype]:
        raise ValueError(f"{dtype} of shape {shape} cannot take the {end - begin} bytes {begin}..{end}")
    return StoredTensor(path, dtype, tuple(shape), data_start + begin, end - begin)


def _check_extent(path: Path, tensors: Mapping[str, StoredTensor], size: int, data_start: int) -> None:
    """The tensors must tile the rest of the file, as the format demands."""
    position = data_start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != position:
            raise ModelFolderError(f"{path}: its safetensors header is damaged (tensors overlap or leave gaps)")
        position += tensor.nbytes
    if position != size:
        what = "cut off" if size < position else "followed by something else"
        raise ModelFolderError(
            f"{path} is {what}: its header describes {position} bytes, the file has {size}. Copy or download it again"
        )


def _refuse_other_formats(path: Path, start: bytes, size: int) -> None:
    if start.startswith(b"version https://git-lfs"):
        raise ModelFolderError(
            f"{path} is a Git LFS pointer of {size} bytes, not the weights. Run `git lfs pull` in that folder, or "
            "download the model again"
        )
    if start.startswith((b"\x80", b"PK\x03\x04")) and start[8:9] != b"{":
        raise ModelFolderError(
            f"{path} is named safetensors but is a pickle or zip archive (torch.save). Pickles can run code when "
            "loaded and are never read here; convert it with safetensors.torch.save_file"
        )
    if size < 10 or start[8:9] != b"{":
        raise ModelFolderError(
            f"{path} is no safetensors file ({size} bytes, no JSON header). Copy or download it again"
        )
