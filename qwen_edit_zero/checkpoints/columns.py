"""Tables of numbers as safetensors files, one 1-D tensor a column: a hundred times faster to read than JSON."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.checkpoints.disk import ChecksummedFile
from qwen_edit_zero.safetensors_file import build_header

_NAMES = {"uint8": "U8", "int32": "I32", "int64": "I64", "uint64": "U64"}
_DTYPES = {name: np.dtype(dtype).newbyteorder("<") for dtype, name in _NAMES.items()}

Column = npt.NDArray[Any]


def write_columns(path: Path, columns: Mapping[str, Column], metadata: Mapping[str, str]) -> ChecksummedFile:
    """Write and sync a file; the metadata comes first in it. Raises OSError."""
    entries = [(name, _NAMES[column.dtype.name], column.shape) for name, column in columns.items()]
    with ChecksummedFile(path) as file:
        file.write(build_header(entries, metadata))
        for column in columns.values():
            little = np.ascontiguousarray(column, dtype=column.dtype.newbyteorder("<"))
            file.write(little.view(np.uint8).data)
    return file


def parse_columns(content: bytes) -> tuple[dict[str, str], dict[str, Column]]:
    """Metadata and columns (views of `content`, read-only). Raises ValueError if these are not such a file's bytes."""
    try:
        (length,) = struct.unpack_from("<Q", content)
        begin = 8 + length
        header = json.loads(content[8:begin])
        metadata = header.pop("__metadata__")
        columns = {}
        for name, entry in header.items():
            first, end = entry["data_offsets"]
            dtype = _DTYPES[entry["dtype"]]
            columns[name] = np.frombuffer(content, dtype, (end - first) // dtype.itemsize, begin + first)
            if columns[name].shape != tuple(entry["shape"]):
                raise ValueError(f"column {name} has {end - first} bytes for shape {entry['shape']}")
    except (struct.error, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(f"not a table: {error!r}") from None
    return metadata, columns
