"""The demo data's edits: each is a fixed rule on pixels, so that a small model can learn it.

All functions take and return RGB pictures; none is random.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image, ImageDraw, ImageFont, ImageOps

Colour = tuple[int, int, int]

COLOURS: dict[str, Colour] = {
    "red": (225, 30, 35),
    "green": (30, 175, 60),
    "blue": (35, 75, 230),
    "yellow": (250, 215, 30),
    "purple": (150, 45, 200),
    "orange": (250, 130, 20),
}


def recolour(picture: Image.Image, colour: Colour) -> Image.Image:
    """The picture in shades of one colour: luminance from near black over the colour to near white."""
    grey = np.asarray(ImageOps.grayscale(picture), dtype=np.float32)[..., None] / 255
    tone = np.array(colour, dtype=np.float32)
    shade = np.where(grey < 0.6, tone * (0.15 + grey / 0.6 * 0.85), tone + (255 - tone) * (grey - 0.6) / 0.4 * 0.7)
    return Image.fromarray(shade.clip(0, 255).round().astype(np.uint8))


Style = Literal["greyscale", "night", "sepia", "negative"]


def style(picture: Image.Image, kind: Style) -> Image.Image:
    """Greyscale, a night scene (dark and blue), sepia, or a photographic negative."""
    if kind == "greyscale":
        return ImageOps.grayscale(picture).convert("RGB")
    if kind == "negative":
        return ImageOps.invert(picture)
    pixels = np.asarray(picture, dtype=np.float32)
    if kind == "night":
        grey = pixels.mean(axis=2, keepdims=True)
        mixed = (0.5 * pixels + 0.5 * grey) * np.array([0.16, 0.24, 0.52], dtype=np.float32)
        return Image.fromarray(mixed.round().astype(np.uint8))
    grey = np.asarray(ImageOps.grayscale(picture), dtype=np.float32)[..., None]
    tone = grey * np.array([1.05, 0.82, 0.52], dtype=np.float32) + np.array([35, 20, 5], dtype=np.float32)
    return Image.fromarray(tone.clip(0, 255).round().astype(np.uint8))


Turn = Literal["mirror", "flip", "half_turn"]


def turn(picture: Image.Image, kind: Turn) -> Image.Image:
    """Left-right mirror image, upside-down flip, or a turn by 180 degrees."""
    if kind == "mirror":
        return ImageOps.mirror(picture)
    return ImageOps.flip(picture) if kind == "flip" else picture.transpose(Image.Transpose.ROTATE_180)


Place = Literal["top", "bottom"]


def banner(picture: Image.Image, text: str, place: Place, colour: Colour, font: Path) -> Image.Image:
    """A banner over the whole width, 3/8 of the height, with the text in large letters."""
    out = picture.copy()
    draw = ImageDraw.Draw(out)
    height = round(picture.height * 3 / 8 / 16) * 16
    top = 0 if place == "top" else picture.height - height
    draw.rectangle((0, top, picture.width, top + height - 1), fill=colour)
    ink = (0, 0, 0) if sum(colour) > 420 else (255, 255, 255)
    _centred(draw, text, (picture.width / 2, top + height / 2), picture.width * 0.9, height * 0.72, ink, font)
    return out


def _centred(
    draw: ImageDraw.ImageDraw, text: str, at: tuple[float, float], width: float, height: float, ink: Colour, font: Path
) -> None:
    """Draw `text` centred at `at`, as large as fits into width x height."""
    size = int(height)
    while size > 8:
        face = ImageFont.truetype(str(font), size)
        left, top, right, bottom = draw.textbbox((0, 0), text, font=face, stroke_width=1)
        if right - left <= width and bottom - top <= height:
            break
        size -= 1
    origin = (at[0] - (left + right) / 2, at[1] - (top + bottom) / 2)
    draw.text(origin, text, fill=ink, font=face, stroke_width=1, stroke_fill=ink)


Shape = Literal["disc", "square", "diamond", "frame"]


def mask_of(size: tuple[int, int], shape: Shape, centre: tuple[float, float], radius: float) -> Image.Image:
    """Anti-aliased mask (mode L) of a shape of half-width `radius` pixels around `centre`."""
    scale = 4
    mask = Image.new("L", (size[0] * scale, size[1] * scale))
    draw = ImageDraw.Draw(mask)
    x, y, r = centre[0] * scale, centre[1] * scale, radius * scale
    if shape == "disc":
        draw.ellipse((x - r, y - r, x + r, y + r), fill=255)
    elif shape == "square":
        draw.rounded_rectangle((x - r, y - r, x + r, y + r), radius=r / 4, fill=255)
    elif shape == "diamond":
        draw.polygon([(x - 1.2 * r, y), (x, y - 1.2 * r), (x + 1.2 * r, y), (x, y + 1.2 * r)], fill=255)
    else:
        draw.rectangle((0, 0, mask.width, mask.height), fill=255)
        inset = radius * scale
        draw.rectangle((inset, inset, mask.width - inset, mask.height - inset), fill=0)
    return mask.resize(size, Image.Resampling.BOX)


def sticker(picture: Image.Image, mask: Image.Image, colour: Colour) -> Image.Image:
    """A flat shape pasted onto the picture."""
    return Image.composite(Image.new("RGB", picture.size, colour), picture, mask)


def contrast(picture: Image.Image, mask: Image.Image, colour: Colour) -> float:
    """Root mean square difference between a colour and what the mask covers, in 8-bit steps."""
    weight = np.asarray(mask, dtype=np.float32)[..., None] / 255
    square = (np.asarray(picture, dtype=np.float32) - np.array(colour, dtype=np.float32)) ** 2
    return float(np.sqrt((square * weight).sum() / (3 * weight.sum())))


def in_front(subject: Image.Image, background: Image.Image, mask: Image.Image) -> Image.Image:
    """The part of `subject` under the mask, in front of `background`."""
    return Image.composite(subject, background, mask)


def side_by_side(pictures: list[Image.Image]) -> Image.Image:
    """Equal vertical strips: strip i of n shows what picture i shows there."""
    out = pictures[0].copy()
    n = len(pictures)
    for i, picture in enumerate(pictures):
        box = (round(i * out.width / n), 0, round((i + 1) * out.width / n), out.height)
        out.paste(picture.crop(box), box)
    return out


def tone_of(picture: Image.Image, tone: Image.Image) -> Image.Image:
    """The picture's luminance in the mean colour of `tone`."""
    mean = np.asarray(tone, dtype=np.float32).mean(axis=(0, 1))
    grey = np.asarray(ImageOps.grayscale(picture), dtype=np.float32)[..., None] / 255
    return Image.fromarray((mean * (0.25 + 1.5 * grey)).clip(0, 255).round().astype(np.uint8))
