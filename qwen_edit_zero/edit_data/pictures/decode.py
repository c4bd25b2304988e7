"""The one picture decoder, for training, caching and sampling alike; its rules are stated in `docs/data.md`."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import BinaryIO

from PIL import Image, ImageFile, UnidentifiedImageError

from qwen_edit_zero.edit_data.pictures.colour import to_srgb
from qwen_edit_zero.edit_data.pictures.png import scan_png
from qwen_edit_zero.edit_data.storage.files import PictureFile, as_file, check_limit, refusal
from qwen_edit_zero.edit_data.storage.local import os_reason
from qwen_edit_zero.errors import QwenEditError

RULES_VERSION = 1  # raised whenever some file would decode to other pixels: it is part of every cache key
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000")
MAX_BYTES = 256 * 1024**2
MAX_PIXELS = 8192 * 8192
MIN_SIDE = 8
MAX_ASPECT = 200  # the limit of the vision-language model's own resizing

_ORIENTATION = 0x0112
_TURN = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDES_SWAP = frozenset(_TURN[value] for value in (5, 6, 7, 8))
_NOT_RASTER = (
    (b"<svg", "it is an SVG drawing, not a raster image"),
    (b"<?xml", "it is XML (an SVG drawing?), not a raster image"),
    (b"<!doctype html", "it is a web page, not a picture: the download failed"),
    (b"<html", "it is a web page, not a picture: the download failed"),
    (b"version https://git-lfs", "it is a Git LFS pointer: fetch the real file with `git lfs pull`"),
    (b"%pdf", "it is a PDF document, not a raster image"),
)


def load_picture(file: PictureFile | Path) -> Image.Image:
    """Decode a picture completely: mode RGB, 8 bits, sRGB, upright, with no metadata left on it.

    Raises:
        StorageError: the store does not answer.
        DataError: the file cannot be read, is no picture of an accepted format, is cut short or damaged, breaks a size
            limit, or shows nothing. The message names the file.
    """
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # another library may have switched it on for the whole process
    file = as_file(file)
    data = io.BytesIO(file.read(MAX_BYTES))
    try:
        with _open(data, file.name) as image:
            turn = _turn(image, data, verify=True)
            image.load()
            rgb = to_srgb(image)
    except QwenEditError:
        raise
    except Exception as error:  # decoders raise whatever they like on damaged input
        raise refusal(file.name, f"it cannot be decoded: {_first_line(error)}") from error
    if turn is not None:
        rgb = rgb.transpose(turn)
    elif rgb is image:
        rgb = rgb.copy()
    rgb.info.clear()
    return rgb


def picture_size(file: PictureFile | Path) -> tuple[int, int]:
    """(width, height) in pixels of the upright picture, from the header alone.

    Raises:
        DataError, StorageError: as `load_picture`, for what the header shows.
    """
    file = as_file(file)
    try:
        with file.open() as stream, _open(stream, file.name) as image:
            width, height = image.size
            turn = _turn(image, stream, verify=False)
    except QwenEditError:
        raise
    except OSError as error:
        raise refusal(file.name, os_reason(error)) from error
    except Exception as error:
        raise refusal(file.name, f"its header cannot be read: {_first_line(error)}") from error
    return (height, width) if turn in _SIDES_SWAP else (width, height)


# Pillow would warn from half of its own limit on; ours is checked below, before any pixel is decoded.
Image.MAX_IMAGE_PIXELS = None


def _open(file: BinaryIO, name: str) -> Image.Image:
    """Open by content, never by file ending, and check the limits before any pixel is decoded."""
    head = file.read(256)
    if not head:
        raise refusal(name, "the file is empty (0 bytes)")
    check_limit(name, file.seek(0, os.SEEK_END), MAX_BYTES)
    file.seek(0)
    try:
        image = Image.open(file, formats=FORMATS)
    except UnidentifiedImageError as error:
        raise refusal(name, _what_it_is(head)) from error
    width, height = image.size
    problem = None
    if width * height > MAX_PIXELS:
        problem = f"it is {width} x {height}, {width * height:,} pixels; the limit is {MAX_PIXELS:,}; make it smaller"
    elif min(width, height) < MIN_SIDE:
        problem = f"it is {width} x {height} pixels; each side must have at least {MIN_SIDE}"
    elif max(width, height) > MAX_ASPECT * min(width, height):
        problem = f"it is {width} x {height} pixels; no side may be over {MAX_ASPECT} times the other; crop it"
    if problem:
        image.close()
        raise refusal(name, problem)
    return image


def _turn(image: Image.Image, file: BinaryIO, *, verify: bool) -> Image.Transpose | None:
    """How stored pixels must be turned, from EXIF; what EXIF has no sense for is upright. Checks a PNG's checksums."""
    if image.format == "TIFF":
        return None  # Pillow turns TIFF pixels itself, and gives the upright size
    raw = image.info.get("exif")
    if image.format == "PNG":
        position = file.tell()
        late = scan_png(file, verify=verify)
        file.seek(position)
        raw = raw or late
    if not raw:
        return None
    try:
        exif = Image.Exif()
        exif.load(raw)
        return _TURN.get(exif.get(_ORIENTATION, 1))
    except Exception:  # the pixels are fine, only their description is not
        return None


def _what_it_is(head: bytes) -> str:
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    for start, reason in _NOT_RASTER:
        if text.startswith(start):
            return reason
    return f"it is no picture of an accepted format ({', '.join(FORMATS)}), or its header is damaged"


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
