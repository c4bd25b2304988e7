"""What Pillow does not look at in a PNG: checksums, EXIF behind the pixels, whether all pixels are there, HDR."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import BinaryIO

from qwen_edit_zero.edit_data.pictures.problem import PictureProblemError

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_EXIF_LIMIT = 1 << 20
_PIECE = 1 << 18  # bytes inflated at once
_CHANNELS = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}  # by colour type
# (first column, first row, columns apart, rows apart) of the passes of an interlaced picture: PNG, section 8.2
_PASSES = (
    (0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PngFacts:
    """What the chunks of a PNG say.

    Attributes:
        exif: content of the `eXIf` chunk, before or behind the pixels.
        bits: of a channel, or of a palette's index.
        colour_type: 0 grey, 2 RGB, 3 palette, 4 grey and alpha, 6 RGB and alpha.
        interlaced: Adam7.
        transfer: transfer function of the `cICP` chunk (ITU-T H.273), which stands above all profiles.
    """

    exif: bytes | None
    bits: int
    colour_type: int
    interlaced: bool
    transfer: int | None

    def pixel_bytes(self, width: int, height: int) -> int:
        """Bytes of the inflated picture, filter bytes included."""
        total = 0
        for column, row, columns, rows in _PASSES if self.interlaced else ((0, 0, 1, 1),):
            across, down = -(-(width - column) // columns), -(-(height - row) // rows)
            if across > 0 and down > 0:
                total += down * (1 + -(-across * self.bits * _CHANNELS.get(self.colour_type, 1) // 8))
        return total


def scan_png(file: BinaryIO, *, verify: bool) -> PngFacts:
    """Walk over the chunks of a PNG.

    Pillow decodes the whole picture to find an `eXIf` chunk behind the pixels, and skips the checksums of the pixel
    data. With `verify` every chunk is read and its CRC-32 compared; without it the pixel data is skipped over.

    Raises:
        PictureProblemError: a checksum is wrong, or the file ends before its end chunk.
    """
    file.seek(len(_SIGNATURE))
    exif: bytes | None = None
    transfer: int | None = None
    header = bytes(13)
    while True:
        head = file.read(8)
        if len(head) < 8:
            raise PictureProblemError("the file ends before the PNG's end chunk: it was cut short")
        length, kind = int.from_bytes(head[:4], "big"), head[4:]
        wanted = kind in (b"IHDR", b"eXIf", b"cICP") and length <= _EXIF_LIMIT
        if verify or wanted:
            body = file.read(length)
            checksum = file.read(4)
            if len(body) < length or len(checksum) < 4:
                raise PictureProblemError("the file ends inside a PNG chunk: it was cut short")
            if zlib.crc32(body, zlib.crc32(kind)) != int.from_bytes(checksum, "big"):
                raise PictureProblemError(
                    f"the checksum of its {kind.decode('latin-1')} chunk is wrong: the file is damaged"
                )
            if kind == b"IHDR" and length == 13:
                header = body
            elif kind == b"eXIf" and wanted and exif is None:
                exif = body
            elif kind == b"cICP" and length == 4:
                transfer = body[1]
        else:
            file.seek(length + 4, 1)
        if kind == b"IEND":
            return PngFacts(exif, header[8], header[9], header[12] != 0, transfer)


def check_pixels(file: BinaryIO, wanted: int) -> None:
    """Inflate the pixel data, keeping nothing, until there are `wanted` bytes (`PngFacts.pixel_bytes`).

    A PNG whose pixel data ends early, though its chunks are whole, leaves Pillow's picture black from there on.

    Raises:
        PictureProblemError: there are fewer.
    """
    file.seek(len(_SIGNATURE))
    inflate, found = zlib.decompressobj(), 0
    while found < wanted and len(head := file.read(8)) == 8 and head[4:] != b"IEND":
        body = file.read(int.from_bytes(head[:4], "big"))
        file.seek(4, 1)
        while head[4:] == b"IDAT" and body and found < wanted:
            found += len(inflate.decompress(body, _PIECE))
            body = inflate.unconsumed_tail
    if found < wanted:
        raise PictureProblemError(f"its pixel data ends after {found:,} of {wanted:,} bytes: the file is incomplete")
