"""The safetensors container, written as a stream: its header is known before the first tensor is. Imports no torch.

Layout (https://github.com/huggingface/safetensors#format): 8 bytes little-endian header length N, N bytes of JSON
`{"__metadata__": {str: str}, name: {"dtype", "shape", "data_offsets": [begin, end]}}`, then the data, to which the
offsets are relative and which has no holes.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping

ITEM_SIZE = {
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
