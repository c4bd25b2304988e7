"""What is measured of a reference and a target that show one frame: how much differs, and whether they lie on another.

Both are brought to one small grid first, which takes out noise and the traces of JPEG.
"""

from __future__ import annotations

import functools

import numpy as np
import numpy.typing as npt
from PIL import Image

from qwen_edit_zero.edit_data.pictures.alignment import Box

PAIRS_VERSION = 1  # raised whenever a measure of this file would come out otherwise
PAIR = np.dtype(
    [
        ("version", "<u4"),  # of the decoder's rules and of this file's
        ("difference", "<f4"),  # mean difference, 0 to 255 levels: the larger of lightness and colour
        ("changed", "<f4"),  # share of the grid that differs clearly, likewise
        ("across", "<f4"),  # shift of the target's content against the reference's, to the right ...
        ("down", "<f4"),  # ... and down, as shares of the frame's longer side; 0 if under half a cell
        ("zoom", "<f4"),  # how much larger it is: 0.02 is 2 %. All three are nan where it cannot be told
    ]
)
SAME_DIFFERENCE, SAME_CHANGED = 1.5, 0.0005  # under both of them, the target shows what the reference shows
_GRID = 256  # cells of the longer side
_LEAST_SHIFT, _LEAST_AT_EDGE = 0.5, 0.75  # cells that content must be shifted, or lie apart at the edges by zoom
_COARSE = 4  # cells of the grid, each way, over which colours are averaged: JPEG stores them blurred
_CLEARLY = 10  # levels of difference
_BLOCK, _SMALL_BLOCK = 64, 32  # cells; side of the parts that are laid on each other; the latter on small grids
_SMALL_GRID = 192
_PLAIN = 3.0  # levels of spread under which a part cannot be placed
_LEAST_PEAK = 0.12  # of the correlation of two parts, under which they show different things
_FAR = 0.25  # of a part's side; what lies further away is not found
_TOGETHER = 0.35  # cells by which parts may be off the common movement
_LEAST_PARTS, _LEAST_SHARE = 6, 0.5  # of the parts with something in them, that must move alike


def compare(reference: Image.Image, reference_box: Box, target: Image.Image, target_box: Box) -> npt.NDArray[np.void]:
    """The record (shape ()) of two decoded RGB pictures whose boxes, in pixels, show one frame."""
    pair = np.zeros((), PAIR)
    grid = _grid(reference_box, target_box)
    one, other = _on_grid(reference, reference_box, grid), _on_grid(target, target_box, grid)
    lightness = np.abs(_grey(one) - _grey(other))
    colour = np.abs(_coarse(one - other)).max(-1)
    pair["difference"] = max(lightness.mean(), colour.mean())
    pair["changed"] = max((lightness > _CLEARLY).mean(), (colour > _CLEARLY).mean())
    pair["across"], pair["down"], pair["zoom"] = movement(_grey(one), _grey(other))
    return pair


def shows_the_same(pair: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Whether the target shows what the reference shows, of records of any shape."""
    return np.asarray((pair["difference"] < SAME_DIFFERENCE) & (pair["changed"] < SAME_CHANGED))


def lies_elsewhere(pair: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
    """Whether the target's content is shifted or zoomed against the reference's, of records of any shape."""
    return np.asarray(np.nan_to_num(np.abs(pair["across"]) + np.abs(pair["down"]) + np.abs(pair["zoom"])) > 0)


def movement(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> tuple[float, float, float]:
    """(shift right, shift down, zoom) from `one` to `other`, grey (h, w); shifts as shares of the longer side.

    Parts of both are laid on each other by phase correlation. Those that an edit has changed correlate with nothing and
    are left out; the rest must agree on one shift and one zoom about the middle, else all three are nan.
    """
    height, width = one.shape
    nothing = (float("nan"),) * 3
    block = _BLOCK if max(width, height) > _SMALL_GRID else _SMALL_BLOCK
    if min(width, height) < block:
        return nothing
    places = [(top, left) for top in _starts(height, block) for left in _starts(width, block)]
    parts = np.stack([[p[t : t + block, a : a + block] for t, a in places] for p in (one, other)])
    parts = parts - parts.mean((2, 3), keepdims=True)
    told = (parts.std((2, 3)) > _PLAIN).all(0)
    if told.sum() < _LEAST_PARTS:
        return nothing
    moves, peaks = _phase_shifts(parts[0, told], parts[1, told])
    centres = np.array(places, np.float64)[told] + block / 2 - np.array([height, width]) / 2
    good = (peaks > _LEAST_PEAK) & (np.abs(moves).max(1) < _FAR * block)
    least = max(_LEAST_PARTS, _LEAST_SHARE * told.sum())
    if good.sum() < least:
        return nothing
    moves, centres = moves[good], centres[good]
    inside = np.abs(moves - np.median(moves, 0)).max(1) < _FAR * block / 4
    shift, zoom = np.zeros(2), 0.0
    for _ in range(4):
        if inside.sum() < least:
            return nothing
        shift, zoom = _fit(moves[inside], centres[inside])
        inside = np.abs(moves - shift - zoom * centres).max(1) < _TOGETHER
    if inside.sum() < least:
        return nothing
    longest = max(width, height)
    shift[np.abs(shift) < _LEAST_SHIFT] = 0
    if abs(zoom) * longest / 2 < _LEAST_AT_EDGE:
        zoom = 0.0
    return float(shift[1] / longest), float(shift[0] / longest), zoom


def _phase_shifts(
    one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """((n, 2) shifts (down, right) of the parts of `other`, (n,) heights of the peaks, 1 for equal parts)."""
    block = one.shape[-1]
    window, smooth, highest = _filters(block)
    cross = np.fft.rfft2(other * window) * np.conj(np.fft.rfft2(one * window))
    cross = cross / np.maximum(np.abs(cross), 1e-6) * smooth
    found = np.fft.irfft2(cross, s=(block, block)) / highest
    n = len(found)
    at = found.reshape(n, -1).argmax(1)
    rows, columns = at // block, at % block
    each = np.arange(n)
    peaks = found[each, rows, columns]
    down = rows + _vertex(found[each, rows - 1, columns], peaks, found[each, (rows + 1) % block, columns])
    right = columns + _vertex(found[each, rows, columns - 1], peaks, found[each, rows, (columns + 1) % block])
    moves = np.stack([down, right], 1)
    return (moves + block / 2) % block - block / 2, peaks


def _vertex(
    before: npt.NDArray[np.float64], peak: npt.NDArray[np.float64], after: npt.NDArray[np.float64]
) -> npt.NDArray[np.float64]:
    """Where between its neighbours a peak of the form of a Gaussian is highest, -0.5 to 0.5."""
    low, high, mid = (np.log(np.maximum(v, 1e-6)) for v in (before, after, peak))
    curve = low - 2 * mid + high
    return np.where(curve < 0, np.clip((low - high) / np.minimum(2 * curve, -1e-9), -0.5, 0.5), 0.0)


def _fit(moves: npt.NDArray[np.float64], centres: npt.NDArray[np.float64]) -> tuple[npt.NDArray[np.float64], float]:
    """Shift (down, right) and zoom that explain the moves of parts at these places, by least squares."""
    middle = centres.mean(0)
    spread = ((centres - middle) ** 2).sum()
    mean = moves.mean(0)
    zoom = float(((centres - middle) * (moves - mean)).sum() / spread) if spread else 0.0
    return mean - zoom * middle, zoom


def _starts(length: int, block: int) -> list[int]:
    """Where parts begin: each covers about a quarter of the next."""
    count = max(1, round((length - block) / (0.75 * block)) + 1)
    return [round(i * (length - block) / max(1, count - 1)) for i in range(count)]


@functools.cache
def _filters(block: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32], float]:
    """What a part is faded out by at its edges, what of its frequencies counts, and the highest peak there is then."""
    hann = np.hanning(block + 2)[1:-1].astype(np.float32)
    cycles = np.hypot(np.fft.fftfreq(block)[:, None], np.fft.rfftfreq(block)[None, :])
    smooth = np.exp(-((cycles / 0.18) ** 2)).astype(np.float32)  # the finest detail is mostly noise
    highest = float(np.fft.irfft2(smooth.astype(np.complex128), s=(block, block))[0, 0])
    return np.outer(hann, hann), smooth, highest


def _grid(one: Box, other: Box) -> tuple[int, int]:
    """(columns, rows) of the grid: the smaller picture's, at most 256 of the longer side."""
    width, height = min(((b[2] - b[0], b[3] - b[1]) for b in (one, other)), key=max)
    scale = min(1.0, _GRID / max(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))


def _on_grid(image: Image.Image, box: Box, grid: tuple[int, int]) -> npt.NDArray[np.float32]:
    return np.asarray(image.resize(grid, Image.Resampling.BILINEAR, box=box, reducing_gap=2.0), np.float32)


def _coarse(picture: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Means over squares of cells; what is left over at the right and below is left out, if anything else is there."""
    rows, columns = (max(1, side // _COARSE) for side in picture.shape[:2])
    high, wide = min(_COARSE, picture.shape[0]), min(_COARSE, picture.shape[1])
    whole = picture[: rows * high, : columns * wide].reshape(rows, high, columns, wide, 3)
    return np.asarray(whole.mean((1, 3)))


def _grey(picture: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    return np.asarray(picture @ np.array([0.299, 0.587, 0.114], np.float32))
