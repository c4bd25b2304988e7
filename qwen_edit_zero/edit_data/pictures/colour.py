"""From whatever a picture file holds to 8-bit sRGB: bit depth, palettes, inks, colour profiles, transparency."""

from __future__ import annotations

import functools
import io

import numpy as np
from PIL import Image, ImageChops, ImageCms

from qwen_edit_zero.edit_data.pictures.problem import PictureProblemError

BACKGROUND = (255, 255, 255)  # what shows through transparent pixels

GREY_SAMPLES = "qwen_edit_zero: bits of a grey sample, whether 0 is white"  # a key of `Image.info`

_BAND = 1 << 20  # pixels converted at once
_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N")
_PREMULTIPLIED = {"La": "LA", "RGBa": "RGBA"}
_PROFILE_SPACE = {"RGB": "RGB", "L": "GRAY", "CMYK": "CMYK"}


def to_srgb(image: Image.Image, *, visible: tuple[int, int, int, int] | None = None) -> Image.Image:
    """The picture as mode RGB, 8 bits, sRGB, transparency blended on white. The image must be loaded.

    Works through bands of rows, so that of large pictures there are never more than two whole copies in memory.

    Args:
        visible: (left, top, right, bottom) of what the file covers of its canvas; the rest is transparent.

    Raises:
        PictureProblemError: the pixel format has no stated range or meaning, or nothing of the picture is visible.
    """
    width, height = image.size
    rows = max(1, _BAND // width)
    if height <= rows:
        rgb, seen = _band_to_srgb(image)
    else:
        rgb, seen = Image.new("RGB", image.size), False
        for top in range(0, height, rows):
            band = image.crop((0, top, width, min(top + rows, height)))
            band.info = image.info
            converted, something = _band_to_srgb(band)
            rgb.paste(converted, (0, top))
            seen = seen or something
    if not seen:
        raise PictureProblemError(
            "it is transparent everywhere, so nothing of it is visible (of an animation only the first frame counts)"
        )
    if visible is not None and visible != (0, 0, *image.size):
        canvas = Image.new("RGB", rgb.size, BACKGROUND)
        canvas.paste(rgb.crop(visible), visible)
        return canvas
    return rgb


def to_grey(image: Image.Image) -> Image.Image:
    """A mask as mode L: grey as it is, colours by luminance (ITU-R 601), transparent parts black; no colour profiles.

    Raises:
        PictureProblemError: as `to_srgb`, or the values are labels 0 and 1 instead of black and white.
    """
    colour, alpha = _split(image)
    grey = colour.convert("L")
    if alpha is not None:
        grey = ImageChops.multiply(grey, alpha)
    if grey.getextrema()[1] == 1:
        raise PictureProblemError(
            "its largest value is 1 of 255, as in a map of labels; in a mask what counts is white (255)"
        )
    return grey


def _band_to_srgb(image: Image.Image) -> tuple[Image.Image, bool]:
    """The converted picture, and whether anything of it is visible."""
    colour, alpha = _split(image)
    rgb = _apply_profile(colour, image.info.get("icc_profile"))
    if alpha is None:
        return rgb, True
    low, high = alpha.getextrema()
    if low == 255:
        return rgb, True
    return Image.composite(rgb, Image.new("RGB", rgb.size, BACKGROUND), alpha), high != 0


def _split(image: Image.Image) -> tuple[Image.Image, Image.Image | None]:
    """Colours as L, RGB or CMYK of 8 bits, and alpha as L if there is any."""
    key = image.info.get("transparency")
    if image.mode in _SIXTEEN_BIT:
        values = np.asarray(image).astype(np.uint16)
        alpha = Image.fromarray(np.where(values == key, 0, 255).astype(np.uint8)) if isinstance(key, int) else None
        bits, inverted = image.info.get(GREY_SAMPLES, (16, False))
        grey = (values >> (bits - 8)).astype(np.uint8)
        return Image.fromarray(255 - grey if inverted else grey), alpha
    if image.mode in _PREMULTIPLIED:
        image = image.convert(_PREMULTIPLIED[image.mode])
    elif image.mode == "P":
        image = image.convert("RGB" if key is None else "RGBA")
    elif image.mode == "PA":
        image = image.convert("RGBA")
    elif image.mode in ("RGBX", "YCbCr"):
        image = image.convert("RGB")
    elif image.mode in ("1", "L", "RGB") and key is not None:
        if isinstance(key, tuple) and max(key) > 255:
            raise PictureProblemError(
                "it has 16 bits a channel and a transparent colour, which cannot be told apart in 8 bits"
            )
        image = image.convert("RGBA" if image.mode == "RGB" else "LA")
    if image.mode == "1":
        image = image.convert("L")
    if image.mode in ("L", "RGB", "CMYK"):
        return image, None
    if image.mode == "LA":
        return image.getchannel("L"), image.getchannel("A")
    if image.mode == "RGBA":
        return image.convert("RGB"), image.getchannel("A")
    raise PictureProblemError(
        f"its pixels are of mode {image.mode}, whose range is not stated in the file; save it with 8 or 16 bits"
    )


def _apply_profile(image: Image.Image, profile: bytes | None) -> Image.Image:
    """The picture in sRGB. A profile that is broken, or for other channels than the picture has, is disregarded."""
    if profile:
        transform = _transform(profile, image.mode)
        if transform is not None:
            image = transform.apply(image)
    return image if image.mode == "RGB" else image.convert("RGB")


@functools.lru_cache(maxsize=32)
def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Relative colorimetric with black-point compensation; None where the profile is sRGB itself or of no use."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if source.profile.xcolor_space.strip() != _PROFILE_SPACE[mode]:
            return None
        transform = ImageCms.ImageCmsTransform(
            source,
            ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")),
            mode,
            "RGB",
            ImageCms.Intent.RELATIVE_COLORIMETRIC,
            flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
    except (ImageCms.PyCMSError, OSError, ValueError):
        return None
    if mode == "RGB":
        # Most embedded profiles are sRGB: a round trip through them must not move pixels by a rounding step.
        steps = np.linspace(0, 255, 9).astype(np.uint8)
        lattice = np.stack(np.meshgrid(steps, steps, steps, indexing="ij"), axis=-1).reshape(27, 27, 3)
        mapped = np.asarray(transform.apply(Image.fromarray(lattice)))
        if np.abs(mapped.astype(np.int16) - lattice).max() <= 1:
            return None
    return transform
