"""Crops of photographs for training and judging the tiny VAE, with the kinds of edits that the demo data has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from numpy.random import Generator
from numpy.typing import NDArray
from photos import PHOTOS, load_photo
from PIL import Image, ImageDraw, ImageEnhance, ImageFont, ImageOps
from torch import Tensor

WORDS = (
    "夏天",
    "你好",
    "春风",
    "咖啡",
    "山水",
    "猫",
    "北京",
    "大吉",
    "花",
    "晚安",
    "海",
    "云",
    "OPEN",
    "SALE",
    "NEW",
    "GO",
    "Hello",
)
DETAIL = 128  # a demo picture's side: crops keep the sharpness that a region has when scaled to this size


class Crops:
    """Random, augmented crops of photographs, of the kinds that the demo data has."""

    def __init__(self, pictures: list[Image.Image], font: Path, seed: int) -> None:
        self.pictures = pictures
        self.rng: Generator = np.random.default_rng(seed)
        self.fonts = [ImageFont.truetype(str(font), size) for size in (14, 18, 24, 32)]

    def plain(self, side: int) -> Image.Image:
        rng = self.rng
        picture = self.pictures[rng.integers(len(self.pictures))]
        # The region that a 128-pixel picture would show, then `side`/128 of it.
        limit = min(picture.size)
        region = limit * (160 / limit) ** rng.uniform(0, 1) if limit > 160 else limit
        region *= side / DETAIL
        x, y = rng.uniform(0, picture.width - region), rng.uniform(0, picture.height - region)
        crop = picture.resize((side, side), Image.Resampling.LANCZOS, box=(x, y, x + region, y + region))
        turn = int(rng.integers(8))
        if turn >= 4:
            crop = ImageOps.mirror(crop)
        return crop.rotate(90 * (turn % 4)) if turn % 4 else crop

    def colours(self, crop: Image.Image) -> Image.Image:
        rng = self.rng
        kind = rng.uniform()
        if kind < 0.1:
            crop = ImageOps.grayscale(crop).convert("RGB")
        elif kind < 0.2:
            crop = ImageOps.invert(crop)
        elif kind < 0.45:  # a tint: luminance in a colour
            a = np.asarray(crop, dtype=np.float32)
            tint = rng.uniform(0, 255, 3).astype(np.float32)
            grey = a.mean(axis=2, keepdims=True) / 255
            amount = rng.uniform(0.2, 1)
            a = a * (1 - amount) + amount * tint * (0.3 + grey)
            crop = Image.fromarray(a.clip(0, 255).astype(np.uint8))
        elif kind < 0.65:  # a turn of the hue
            hsv = np.asarray(crop.convert("HSV")).copy()
            hsv[..., 0] += np.uint8(rng.integers(256))
            crop = Image.fromarray(hsv, "HSV").convert("RGB")
        elif kind < 0.8:
            crop = ImageEnhance.Brightness(crop).enhance(rng.uniform(0.3, 1.5))
            crop = ImageEnhance.Contrast(crop).enhance(rng.uniform(0.6, 1.5))
        return crop

    def objects(self, crop: Image.Image) -> Image.Image:
        rng = self.rng
        side = crop.width
        if rng.uniform() < 0.25:  # something pasted on it
            w, h = rng.integers(side // 5, side * 3 // 4, 2)
            x, y = rng.integers(0, side - w), rng.integers(0, side - h)
            mask = Image.new("L", (4 * side, 4 * side))
            draw = ImageDraw.Draw(mask)
            box = (4 * x, 4 * y, 4 * (x + w), 4 * (y + h))
            (draw.ellipse if rng.uniform() < 0.6 else draw.rectangle)(box, fill=255)
            mask = mask.resize(crop.size, Image.Resampling.BOX)
            flat = Image.new("RGB", crop.size, tuple(int(c) for c in rng.integers(0, 256, 3)))
            crop = Image.composite(flat if rng.uniform() < 0.4 else self.plain(side), crop, mask)
        if rng.uniform() < 0.25:
            draw = ImageDraw.Draw(crop)
            for _ in range(rng.integers(1, 3)):
                fill = [(255, 255, 255), (0, 0, 0), (255, 255, 0), (255, 0, 0)][rng.integers(4)]
                stroke = (0, 0, 0) if sum(fill) else (255, 255, 255)
                font = self.fonts[rng.integers(len(self.fonts))]
                at = (int(rng.integers(-8, side - 16)), int(rng.integers(-8, side - 16)))
                word, width = WORDS[rng.integers(len(WORDS))], int(rng.integers(3))
                draw.text(at, word, fill, font, stroke_width=width, stroke_fill=stroke)
        return crop

    def batch(self, count: int, side: int) -> Tensor:
        rows = [np.asarray(self.objects(self.colours(self.plain(side)))) for _ in range(count)]
        return to_tensor(np.stack(rows))


def to_tensor(pixels: NDArray[np.uint8]) -> Tensor:
    """uint8 (B, H, W, 3) -> (B, 3, H, W) in [-1, 1], channels last."""
    x = torch.from_numpy(pixels.copy()).permute(0, 3, 1, 2).float() / 127.5 - 1
    return x.contiguous(memory_format=torch.channels_last)


def held_out(wallpapers: Path, count: int = 40) -> Tensor:
    """Plain 128x128 crops of the photographs that training never sees."""
    rng = np.random.default_rng(20260101)
    rows = []
    photos = [load_photo(p, wallpapers) for p in PHOTOS if p.split == "validation"]
    for i in range(count):
        picture = photos[i % len(photos)]
        limit = min(picture.size)
        region = limit * (160 / limit) ** rng.uniform(0, 1)
        x, y = rng.uniform(0, picture.width - region), rng.uniform(0, picture.height - region)
        box = (x, y, x + region, y + region)
        rows.append(np.asarray(picture.resize((DETAIL, DETAIL), Image.Resampling.LANCZOS, box=box)))
    return to_tensor(np.stack(rows))
