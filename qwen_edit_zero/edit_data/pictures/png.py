"""What Pillow does not look at in a PNG: chunk checksums, and EXIF that stands behind the pixels."""

from __future__ import annotations

import zlib
from typing import BinaryIO

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_EXIF_LIMIT = 1 << 20


def scan_png(file: BinaryIO, *, verify: bool) -> bytes | None:
    """Walk over the chunks of a PNG and return the content of its `eXIf` chunk, if it has one.

    Pillow decodes the whole picture to find an `eXIf` chunk behind the pixels, and skips the checksums of the pixel
    data. With `verify` every chunk is read and its CRC-32 compared; without it the pixel data is skipped over.

    Raises:
        ValueError: a checksum is wrong, or the file ends before its end chunk.
    """
    file.seek(len(_SIGNATURE))
    exif: bytes | None = None
    while True:
        head = file.read(8)
        if len(head) < 8:
            raise ValueError("the file ends before the PNG's end chunk: it was cut short")
        length, kind = int.from_bytes(head[:4], "big"), head[4:]
        wanted = kind == b"eXIf" and exif is None and length <= _EXIF_LIMIT
        if verify or wanted:
            body = file.read(length)
            checksum = file.read(4)
            if len(body) < length or len(checksum) < 4:
                raise ValueError("the file ends inside a PNG chunk: it was cut short")
            if zlib.crc32(body, zlib.crc32(kind)) != int.from_bytes(checksum, "big"):
                raise ValueError(f"the checksum of its {kind.decode('latin-1')} chunk is wrong: the file is damaged")
            if wanted:
                exif = body
        else:
            file.seek(length + 4, 1)
        if kind == b"IEND":
            return exif
