"""Which pictures of a sample show the same frame as its target, and the size at which each of them is prepared.

A model learns what differs between the references and the target. A reference that is shifted or zoomed by a fraction
of a pixel against the target teaches it to shift and zoom; so pictures of one frame are cut and resized as one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Align = Literal["none", "crop"]
Size = tuple[int, int]
Box = tuple[float, float, float, float]

MULTIPLE = 32  # of prepared sides: 8 by the VAE, 2 by the packing of latents, 2 to spare as in the pipeline
CROP_LIMIT = 64  # pixels: `crop` takes sides that differ by less for one frame, cut differently
_CHUNK = 1 << 18  # rows looked at together


@dataclass(frozen=True, slots=True)
class Frames:
    """What is taken of each picture of a sample; the target first, then the references in order.

    Attributes:
        boxes: (left, top, right, bottom) in pixels of the upright picture.
        sizes: (width, height) in pixels to which the box is resized for the VAE.
        aligned: whether the picture shows the target's frame; the target itself does if some reference does.
        nearly: whether the reference is nearly of the target's aspect, but not aligned with it: both sides differ by
            less than 64 pixels and an eighth, so that it probably shows the target's frame. Stretched to one size, it
            would shift against it by up to a few pixels.
    """

    boxes: tuple[Box, ...]
    sizes: tuple[Size, ...]
    aligned: tuple[bool, ...]
    nearly: tuple[bool, ...]


def grid_size(width: int, height: int, *, area: int) -> Size:
    """(width, height) of about `area` pixels with the aspect of a picture, each rounded to a multiple of 32.

    The rule is `calculate_dimensions` of diffusers' `pipeline_qwenimage_edit_plus`: with r = width / height,
    w = sqrt(area * r) and h = w / r. A side may come out as 0: such a picture is too long.
    """
    grid = _grids(np.array([[width, height]], np.int64), area)[0]
    return int(grid[0]), int(grid[1])


def frames_of(target: Size, references: tuple[Size, ...], *, area: int, align: Align = "none") -> Frames:
    """The frames of one sample, from the upright sizes (width, height) of its pictures; see `prepared_sizes`."""
    sizes = np.array([[target, *references]], np.int64).reshape(1, 1 + len(references), 2)
    boxes, aligned, nearly = _frames(sizes, align)
    grids = _prepared(boxes, aligned, area)
    return Frames(
        tuple((float(left), float(top), float(right), float(bottom)) for left, top, right, bottom in boxes[0]),
        tuple((int(w), int(h)) for w, h in grids[0]),
        tuple(bool(a) for a in aligned[0]),
        tuple(bool(n) for n in nearly[0]),
    )


def prepared_sizes(sizes: NDArray[np.integer], *, area: int, align: Align = "none") -> NDArray[np.int32]:
    """Sizes of prepared pictures of many samples.

    A picture's own aspect decides (`grid_size`), except that all pictures of the target's frame take the size of the
    last reference among them, as the pipeline does for its output. A reference shows the target's frame if, scaled to
    one length of the longer side, their shorter sides differ by less than a pixel of the smaller picture. With `align`
    "crop" so does one of which both sides differ by less than 64 pixels and an eighth from the target's; of these and
    the target only the middle is taken, of the smallest width and height among them.

    Args:
        sizes: (n, 1 + references, 2), upright (width, height) of target and references; 0 where there is none.
        area: wanted pixels.

    Returns:
        (n, 1 + references, 2), (width, height); 0 where there is none, or where a picture is too long.
    """
    out = np.zeros(sizes.shape, np.int32)
    for start in range(0, len(sizes), _CHUNK):
        part = np.asarray(sizes[start : start + _CHUNK], np.int64)
        boxes, aligned, _ = _frames(part, align)
        out[start : start + _CHUNK] = _prepared(boxes, aligned, area)
    return out


def same_frame(one: Size, other: Size) -> bool:
    """Whether two pictures have one aspect, to a pixel of the smaller."""
    return bool(_same_aspect(np.array(one, np.int64), np.array(other, np.int64)))


def _same_aspect(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.bool_]:
    cross = np.abs(one[..., 0] * other[..., 1] - one[..., 1] * other[..., 0])
    longest = np.maximum(one.max(-1), other.max(-1))
    aligned: NDArray[np.bool_] = (cross < longest) & (one.min(-1) > 0) & (other.min(-1) > 0)
    return aligned


def _frames(sizes: NDArray[np.int64], align: Align) -> tuple[NDArray[np.float64], NDArray[np.bool_], NDArray[np.bool_]]:
    """Boxes (n, k, 4), aligned (n, k), nearly (n, k)."""
    target, present = sizes[:, :1], sizes.min(-1) > 0
    aligned = _same_aspect(sizes, target)
    difference, smaller = np.abs(sizes - target), np.minimum(sizes, target)
    near = ((difference < CROP_LIMIT) & (difference * 8 < smaller)).all(-1) & present & present[:, :1]
    aligned[:, 0] = near[:, 0] = False
    boxes = np.concatenate([np.zeros(sizes.shape), sizes.astype(np.float64)], -1)
    nearly = near & ~aligned
    if align == "crop":
        # Sizes that differ by a few pixels: one was cut to a multiple of something. The middle of both is taken.
        cut = near.copy()
        cut[:, 0] = near.any(1)
        common = np.where(cut[..., None], sizes, np.iinfo(np.int64).max).min(1, keepdims=True)
        common = np.where(cut[..., None], common, sizes)
        corner = (sizes - common) // 2
        boxes = np.concatenate([corner, corner + common], -1).astype(np.float64)
        # References of another scale, but of the target's aspect before it was cut, are cut by the same share.
        scaled = boxes[:, :1] / np.maximum(np.concatenate([target, target], -1), 1) * np.concatenate([sizes, sizes], -1)
        boxes = np.where((aligned & ~cut)[..., None], scaled, boxes)
        aligned |= near
        nearly = near & False
    aligned[:, 0] = aligned.any(1)
    return boxes, aligned, nearly


def _prepared(boxes: NDArray[np.float64], aligned: NDArray[np.bool_], area: int) -> NDArray[np.int32]:
    grids = _grids(boxes[..., 2:] - boxes[..., :2], area)
    last = aligned.shape[1] - 1 - np.argmax(aligned[:, ::-1], axis=1)  # of the aligned ones
    frame = grids[np.arange(len(grids)), last][:, None]
    return np.where(aligned[..., None], frame, grids)


def _grids(sizes: NDArray[np.generic], area: int) -> NDArray[np.int32]:
    """`grid_size` of (..., 2); 0 for sizes of 0. Float64 and half-to-even rounding, as in Python."""
    width, height = sizes[..., 0].astype(np.float64), sizes[..., 1].astype(np.float64)
    present = (width > 0) & (height > 0)
    ratio = np.where(present, width, 1) / np.where(present, height, 1)
    wanted = np.sqrt(area * ratio)
    grids = np.stack([np.rint(wanted / MULTIPLE), np.rint(wanted / ratio / MULTIPLE)], -1) * MULTIPLE
    return np.where(present[..., None], grids, 0).astype(np.int32)
