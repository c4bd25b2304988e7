"""The one picture decoder, for training, caching and sampling alike; its rules are stated in `docs/data.md`."""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from PIL import Image, ImageFile, UnidentifiedImageError
from PIL.GifImagePlugin import GifImageFile

from qwen_edit_zero.edit_data.pictures.colour import GREY_SAMPLES, to_grey, to_srgb
from qwen_edit_zero.edit_data.pictures.damage import (
    avif_transfer,
    check_jpeg,
    check_png,
    check_range,
    check_tiff,
    grey_of_tiff,
    scaled_key,
)
from qwen_edit_zero.edit_data.pictures.png import PngFacts, scan_png
from qwen_edit_zero.edit_data.pictures.problem import PictureProblemError
from qwen_edit_zero.edit_data.pictures.recognise import FORMATS, what_it_is
from qwen_edit_zero.edit_data.storage.files import PictureFile, as_file, check_limit, refusal
from qwen_edit_zero.edit_data.storage.local import os_reason
from qwen_edit_zero.errors import QwenEditError

RULES_VERSION = 2  # raised whenever some file would decode to other pixels: it is part of every cache key
MAX_BYTES = 256 * 1024**2
MAX_PIXELS = 8192 * 8192
MIN_SIDE = 8
MAX_ASPECT = 200  # the limit of the vision-language model's own resizing

_Convert = Callable[[Image.Image, tuple[int, int, int, int] | None], Image.Image]

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

# Pillow's warnings are about descriptions (EXIF), and do not name the file; damage of pixels is an error here.
warnings.filterwarnings("ignore", module=r"PIL\.")


def load_picture(file: PictureFile | Path) -> Image.Image:
    """Decode a picture completely: mode RGB, 8 bits, sRGB, upright, with no metadata left on it.

    Raises:
        StorageError: the store does not answer.
        DataError: the file cannot be read, is no picture of an accepted format, is cut short or damaged, breaks a size
            limit, or shows nothing. The message names the file.
    """
    return _decoded(file, lambda image, visible: to_srgb(image, visible=visible))


def load_mask(file: PictureFile | Path) -> Image.Image:
    """Decode a mask completely: mode L, upright; white is what counts, black and transparent what does not.

    Raises:
        DataError, StorageError: as `load_picture`, or it holds labels 0 and 1 instead of black and white.
    """
    return _decoded(file, lambda image, visible: to_grey(image))


def _decoded(file: PictureFile | Path, convert: _Convert) -> Image.Image:
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # another library may have switched it on for the whole process
    file = as_file(file)
    content = file.read(MAX_BYTES)
    try:
        upright = _upright(content, file.name, convert)
    except QwenEditError:
        raise
    except PictureProblemError as error:
        raise refusal(file.name, str(error)) from error
    except Exception as error:  # decoders raise whatever they like on damaged input
        raise refusal(file.name, f"it cannot be decoded: {_first_line(error)}") from error
    upright.info.clear()
    return upright


def _upright(content: bytes, name: str, convert: _Convert) -> Image.Image:
    data = io.BytesIO(content)
    with _open(data, name) as image:
        visible = None
        if isinstance(image, GifImageFile) and image.tile:
            visible = image.tile[0].extents  # the first frame need not cover the canvas
        facts = _png_facts(image, data, verify=True)
        if facts is not None:
            check_range(facts.transfer)
        elif image.format == "AVIF":
            check_range(avif_transfer(content))
        turn = _turn(image, facts)
        image.load()
        if facts is not None:
            check_png(data, facts, image)
            scaled_key(image, facts)
        elif image.format in ("JPEG", "MPO"):
            check_jpeg(content, image.mode)
        elif image.format == "TIFF":
            image.info[GREY_SAMPLES] = grey_of_tiff(image)
        converted = convert(image, visible)
        if turn is not None:
            return converted.transpose(turn)
        return converted.copy() if converted is image else converted


def picture_size(file: PictureFile | Path) -> tuple[int, int]:
    """(width, height) in pixels of the upright picture, from the header alone.

    Raises:
        DataError, StorageError: as `load_picture`, for what the header shows.
    """
    file = as_file(file)
    try:
        with file.open() as stream, _open(stream, file.name) as image:
            width, height = image.size
            turn = _turn(image, _png_facts(image, stream, verify=False))
    except QwenEditError:
        raise
    except PictureProblemError as error:
        raise refusal(file.name, str(error)) from error
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
        raise refusal(name, what_it_is(head)) from error
    try:
        check_tiff(image)
    except PictureProblemError as error:
        image.close()
        raise refusal(name, str(error)) from error
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


def _png_facts(image: Image.Image, file: BinaryIO, *, verify: bool) -> PngFacts | None:
    """What the chunks say if it is a PNG; leaves the file where it was."""
    if image.format != "PNG":
        return None
    position = file.tell()
    facts = scan_png(file, verify=verify)
    file.seek(position)
    return facts


def _turn(image: Image.Image, facts: PngFacts | None) -> Image.Transpose | None:
    """How stored pixels must be turned, from EXIF; what EXIF has no sense for is upright."""
    if image.format == "TIFF":
        return None  # Pillow turns TIFF pixels itself, and gives the upright size
    raw = image.info.get("exif") or (facts.exif if facts is not None else None)
    if not raw:
        return None
    try:
        exif = Image.Exif()
        exif.load(raw)
        return _TURN.get(exif.get(_ORIENTATION, 1))
    except Exception:  # the pixels are fine, only their description is not
        return None


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
