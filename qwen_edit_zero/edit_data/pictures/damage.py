"""Damage and odd meanings that Pillow passes over in silence, looked for in the file beside its decoding."""

from __future__ import annotations

import io

import numpy as np
import simplejpeg
from PIL import Image
from PIL.TiffImagePlugin import TiffImageFile

from qwen_edit_zero.edit_data.pictures.png import PngFacts, check_pixels
from qwen_edit_zero.edit_data.pictures.problem import PictureProblemError

_TRANSFERS = {16: "PQ", 18: "HLG"}  # ITU-T H.273: high dynamic range
_NEW_SUBFILE_TYPE, _BITS_PER_SAMPLE, _PHOTOMETRIC = 254, 258, 262
_WHITE_IS_ZERO = 0
_JPEG_DAMAGE = ("premature end", "bad huffman", "bad arithmetic", "corrupt jpeg data: bad", "found marker")


def check_jpeg(data: bytes, mode: str) -> None:
    """Walk over the compressed data of a JPEG (at an eighth of the size, which costs little).

    libjpeg fills what is missing or cannot be decoded with grey and smears, and only warns, which Pillow does not pass
    on: a file cut in the middle that got an end marker would be taken for whole. Unused bytes before a marker do no
    harm.

    Raises:
        PictureProblemError: data are missing or damaged. JPEG has no checksums, so not all damage can be found.
    """
    try:
        simplejpeg.decode_jpeg(
            data, "CMYK" if mode == "CMYK" else "GRAY", min_height=1, min_width=1, min_factor=8, strict=True
        )
    except ValueError as error:
        if any(part in str(error).lower() for part in _JPEG_DAMAGE):
            raise PictureProblemError(f"its data are damaged or incomplete ({error})") from error


def check_png(data: io.BytesIO, facts: PngFacts, image: Image.Image) -> None:
    """Raises PictureProblemError if there is less pixel data than the picture's size, which is loaded, asks for."""
    width, height = image.size
    last = image.crop((0, height - 1, width, height))
    # Rows that were not filled are 0; there are black rows too, and only then the data are inflated once more.
    if facts.interlaced or not np.asarray(last).any():
        check_pixels(data, facts.pixel_bytes(width, height))


def scaled_key(image: Image.Image, facts: PngFacts) -> None:
    """Bring the transparent grey of a PNG with 2 or 4 bits to the 8 bits that Pillow gives its pixels.

    Raises:
        PictureProblemError: the picture has 16 bits a channel, of which Pillow has dropped the lower ones.
    """
    key = image.info.get("transparency")
    if key is None:
        return
    if facts.colour_type == 2 and facts.bits == 16:
        raise PictureProblemError(
            "it has 16 bits a channel and a transparent colour, which cannot be told apart in 8 bits"
        )
    if facts.colour_type == 0 and facts.bits in (2, 4) and isinstance(key, int):
        image.info["transparency"] = key * 255 // (2**facts.bits - 1)


def check_range(transfer: int | None) -> None:
    """Raises PictureProblemError for pictures of high dynamic range, whose numbers would be taken for sRGB's."""
    if transfer in _TRANSFERS:
        raise PictureProblemError(
            f"it is of high dynamic range ({_TRANSFERS[transfer]}), which has no fixed place in sRGB; export it in sRGB"
        )


def avif_transfer(data: bytes) -> int | None:
    """The transfer function in an AVIF's `colr` property; None without one."""
    at = data.find(b"colrnclx", 0, 1 << 16)
    return None if at < 0 else int.from_bytes(data[at + 10 : at + 12], "big")


def check_tiff(image: Image.Image) -> None:
    """Raises PictureProblemError for a TIFF that begins with a thumbnail, as cameras' raw files do."""
    if isinstance(image, TiffImageFile) and int(image.tag_v2.get(_NEW_SUBFILE_TYPE, 0)) & 1:
        raise PictureProblemError(
            "its first page is a thumbnail (a camera's raw file?); develop it to JPEG, PNG or TIFF"
        )


def grey_of_tiff(image: Image.Image) -> tuple[int, bool]:
    """(bits of a grey TIFF's samples, whether 0 is white): Pillow gives both unchanged in mode I;16."""
    if not isinstance(image, TiffImageFile):
        return 16, False
    return int(image.tag_v2.get(_BITS_PER_SAMPLE, (16,))[0]), image.tag_v2.get(_PHOTOMETRIC) == _WHITE_IS_ZERO
