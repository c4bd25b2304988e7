"""From decoded pictures to those that the encoders see: one draw and one resizing for all pictures of a sample.

Without augmentation the result is, bit for bit, what the pipeline makes of the same pictures: its image processor
resizes with Pillow's Lanczos filter, as does this. A crop and a resizing are one step here, with a box in fractions of
pixels, so that pictures of one frame and different sizes stay aligned.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from qwen_edit_zero.edit_data.pictures.alignment import Align, Box, Frames, Size, frames_of, grid_size, same_frame
from qwen_edit_zero.edit_data.pictures.draws import PLAIN, Draw
from qwen_edit_zero.edit_data.pictures.masks import VAE_SCALE, area_mean
from qwen_edit_zero.errors import DataError

PREPARATION_VERSION = 1  # raised whenever a picture would be prepared to other pixels: it is part of every key


@dataclass(frozen=True, slots=True)
class Areas:
    """Pixels of a prepared picture: for the VAE, and for the text encoder, which sees the references too."""

    vae: int
    condition: int


@dataclass(frozen=True, slots=True)
class Preparation:
    """What is done with one picture.

    Attributes:
        box: (left, top, right, bottom) in pixels of the upright picture; None: all of it.
        size: (width, height) in pixels to which it is resized.
        draw: of which mirroring and tones are applied here; the crop is in the box already.
    """

    box: Box | None
    size: Size
    draw: Draw = PLAIN

    def key(self) -> str:
        """A short text that says which pixels come out of given pixels; part of a cache entry's key."""
        box = "" if self.box is None else " of " + " ".join(f"{edge:.9g}" for edge in self.box)
        rest = Draw(flip=self.draw.flip, brightness=self.draw.brightness, contrast=self.draw.contrast).key()
        return f"v{PREPARATION_VERSION} {self.size[0]}x{self.size[1]}{box} {rest}"

    def apply(self, picture: Image.Image) -> Image.Image:
        """The prepared picture; `picture` is upright RGB and stays as it is."""
        box = self.box
        if box is not None:
            # Pillow's filter would look at pixels beside the box; of two pictures of one frame only one may have them.
            left, top, right, bottom = math.floor(box[0]), math.floor(box[1]), math.ceil(box[2]), math.ceil(box[3])
            picture = picture.crop((left, top, right, bottom))
            box = (box[0] - left, box[1] - top, box[2] - left, box[3] - top)
        prepared = picture.resize(self.size, Image.Resampling.LANCZOS, box=box)
        if self.draw.flip:
            prepared = prepared.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        tones = self.draw.tones()
        return prepared if tones is None else prepared.point(list(tones) * len(prepared.getbands()))

    def apply_to_mask(self, mask: Image.Image) -> NDArray[np.float32]:
        """The mask on the latent's grid, (height / 8, width / 8) of `size`, 0 to 1; `mask` is upright grey."""
        cells = (self.size[0] // VAE_SCALE, self.size[1] // VAE_SCALE)
        grid = area_mean(mask, self.box or (0, 0, *mask.size), cells)
        return np.ascontiguousarray(grid[:, ::-1]) if self.draw.flip else grid


@dataclass(frozen=True, slots=True)
class Plan:
    """What is done with each picture of a sample, from their sizes alone.

    Attributes:
        target, references: as the VAE sees them.
        shown: the references as the text encoder sees them.
        mask: None if there is none.
        cropped: whether a drawn crop took effect: it does only if some reference shows the target's frame.
    """

    target: Preparation
    references: tuple[Preparation, ...]
    shown: tuple[Preparation, ...]
    mask: Preparation | None
    cropped: bool


@dataclass(frozen=True, slots=True)
class Pictures:
    """The decoded pictures of a sample: upright RGB; the mask upright grey."""

    target: Image.Image
    references: tuple[Image.Image, ...]
    mask: Image.Image | None = None


@dataclass(frozen=True, slots=True)
class Prepared:
    """What the encoders see of a sample.

    Attributes:
        target, references: RGB, at the sizes of the VAE area; their latents have an eighth of the sides.
        shown: the references, RGB, at the sizes of the condition area, for the text encoder.
        mask: (height / 8, width / 8) of the target, float32 from 0 (unchanged) to 1; None if there is none.
    """

    target: Image.Image
    references: tuple[Image.Image, ...]
    shown: tuple[Image.Image, ...]
    mask: NDArray[np.float32] | None


def plan(
    target: Size,
    references: Sequence[Size],
    *,
    areas: Areas,
    draw: Draw = PLAIN,
    align: Align = "none",
    mask: Size | None = None,
) -> Plan:
    """What is done with the pictures of a sample of these upright sizes, (width, height) in pixels.

    Mirroring and tones are for all pictures. The drawn crop is for those that show the target's frame (see
    `prepared_sizes`), as the same share of each, and the other references stay whole; where no reference shows the
    target's frame nothing is cropped. Prepared sizes do not depend on the draw.

    Raises:
        DataError: the mask has not the target's aspect, or a picture is so long that it would be resized to nothing.
    """
    frames = frames_of(target, tuple(references), area=areas.vae, align=align)
    if mask is not None and not same_frame(mask, target):
        raise DataError(
            f"the mask is {mask[0]} x {mask[1]} pixels, which is not the aspect of the target, {target[0]} x "
            f"{target[1]}: which part of the target it covers cannot be known. Make it of the target's size"
        )
    given = (target, *references)
    for size, prepared in zip(given, frames.sizes, strict=True):
        if 0 in prepared:
            raise DataError(
                f"a picture of {size[0]} x {size[1]} pixels is so long that at an area of {areas.vae:,} pixels "
                f"(data.vae_area) it would be resized to {prepared[0]} x {prepared[1]}; crop it"
            )
    boxes = [_cropped(frames, i, draw) for i in range(len(given))]
    vae = [
        Preparation(_partial(box, size), prepared, draw)
        for box, size, prepared in zip(boxes, given, frames.sizes, strict=True)
    ]
    shown = [
        Preparation(_partial(box, size), _condition_size(frames.boxes[i + 1], areas.condition, size), draw)
        for i, (box, size) in enumerate(zip(boxes[1:], references, strict=True))
    ]
    over = None
    if mask is not None:
        scale = (mask[0] / target[0], mask[1] / target[1]) * 2
        left, top, right, bottom = (edge * by for edge, by in zip(boxes[0], scale, strict=True))
        over = Preparation((left, top, min(right, mask[0]), min(bottom, mask[1])), frames.sizes[0], draw)
    return Plan(vae[0], tuple(vae[1:]), tuple(shown), over, frames.aligned[0] and draw.window() != PLAIN.window())


def prepare(pictures: Pictures, draw: Draw, areas: Areas, *, align: Align = "none") -> Prepared:
    """All pictures of a sample as the encoders see them; see `plan`, which decides from the sizes alone.

    Raises:
        DataError: see `plan`.
    """
    what = plan(
        pictures.target.size,
        [reference.size for reference in pictures.references],
        areas=areas,
        draw=draw,
        align=align,
        mask=None if pictures.mask is None else pictures.mask.size,
    )
    return Prepared(
        what.target.apply(pictures.target),
        tuple(p.apply(picture) for p, picture in zip(what.references, pictures.references, strict=True)),
        tuple(p.apply(picture) for p, picture in zip(what.shown, pictures.references, strict=True)),
        None if what.mask is None or pictures.mask is None else what.mask.apply_to_mask(pictures.mask),
    )


def _cropped(frames: Frames, index: int, draw: Draw) -> Box:
    left, top, right, bottom = frames.boxes[index]
    if not frames.aligned[index]:
        return left, top, right, bottom
    window, width, height = draw.window(), right - left, bottom - top
    return (
        left + window[0] * width,
        top + window[1] * height,
        min(left + window[2] * width, right),
        min(top + window[3] * height, bottom),
    )


def _partial(box: Box, size: Size) -> Box | None:
    return None if box == (0, 0, *size) else box


def _condition_size(box: Box, area: int, size: Size) -> Size:
    """By the picture's own aspect, as in the pipeline, whatever the draw crops."""
    prepared = grid_size(round(box[2] - box[0]), round(box[3] - box[1]), area=area)
    if 0 in prepared:
        raise DataError(
            f"a reference of {size[0]} x {size[1]} pixels is so long that at an area of {area:,} pixels "
            f"(data.condition_area) it would be resized to {prepared[0]} x {prepared[1]}; crop it"
        )
    return prepared
