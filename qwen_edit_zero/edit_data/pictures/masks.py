"""Masks: which part of the target the instruction changes, as one number a latent cell."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from qwen_edit_zero.edit_data.pictures.alignment import Box, Size

VAE_SCALE = 8  # pixels a latent cell, each way


def area_mean(mask: Image.Image, box: Box, size: Size) -> NDArray[np.float32]:
    """The mean of a grey picture (mode L) over each cell of a grid laid over `box`, 0 to 1.

    The picture is taken as constant over each of its pixels, and parts of pixels count as parts: the means over the
    cells sum to the integral over the box, whatever the sizes.

    Args:
        box: (left, top, right, bottom) in pixels of the picture.
        size: (columns, rows) of the grid.

    Returns:
        (rows, columns).
    """
    values = np.asarray(mask, np.float64) / 255
    left, top, right, bottom = box
    by_rows = _cell_means(values, top, bottom, size[1])
    return _cell_means(by_rows.T, left, right, size[0]).T.astype(np.float32)


def _cell_means(values: NDArray[np.float64], start: float, end: float, cells: int) -> NDArray[np.float64]:
    """Means along the first axis between `cells` + 1 equally spaced places."""
    integral = np.concatenate([np.zeros_like(values[:1]), np.cumsum(values, axis=0)])
    places = np.linspace(start, end, cells + 1)
    below = np.minimum(places.astype(np.int64), len(values) - 1)
    part = (places - below)[:, None]
    at = integral[below] + part * values[below]
    means: NDArray[np.float64] = np.clip(np.diff(at, axis=0) * (cells / (end - start)), 0, 1)
    return means
