"""Picture files made byte by byte, for what Pillow does not write."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from typing import Any

from PIL import Image

from qwen_edit_zero.edit_data.storage.files import HeldFile


def held(content: bytes, name: str = "a.png") -> HeldFile:
    return HeldFile(name, content)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(width: int, height: int, *, bits: int, colour: int, rows: Sequence[bytes], before: bytes = b"") -> bytes:
    """Rows are packed samples without filter bytes; `before` are whole chunks between header and pixels."""
    header = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    pixels = zlib.compress(b"".join(b"\0" + row for row in rows))
    chunks = chunk(b"IHDR", header) + before + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + chunks


def tiff(
    width: int,
    height: int,
    data: bytes,
    *,
    bits: int,
    photometric: int,
    samples: int = 1,
    sample_format: int = 1,
    more: Sequence[tuple[int, Sequence[int]]] = (),
) -> bytes:
    """An uncompressed little-endian TIFF of one strip; `more` are further tags of 16-bit numbers."""
    tags: dict[int, tuple[str, Sequence[int]]] = {
        256: ("I", [width]), 257: ("I", [height]), 258: ("H", [bits] * samples), 259: ("H", [1]),
        262: ("H", [photometric]), 273: ("I", [0]), 277: ("H", [samples]), 278: ("I", [height]),
        279: ("I", [len(data)]), 339: ("H", [sample_format] * samples), **{tag: ("H", values) for tag, values in more},
    }  # fmt: skip
    values = {tag: struct.pack(f"<{len(found)}{code}", *found) for tag, (code, found) in tags.items()}
    start = 8 + 2 + 12 * len(tags) + 4
    beside = b"".join(body for _, body in sorted(values.items()) if len(body) > 4)
    values[273] = struct.pack("<I", start + len(beside))
    entries, at = b"", start
    for tag, body in sorted(values.items()):
        code, found = tags[tag]
        entries += struct.pack("<HHI", tag, 3 if code == "H" else 4, len(found))
        entries += body.ljust(4, b"\0") if len(body) <= 4 else struct.pack("<I", at)
        at += len(body) if len(body) > 4 else 0
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + beside + data
