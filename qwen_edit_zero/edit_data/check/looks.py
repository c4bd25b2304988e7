"""What is measured of one decoded picture, and of a mask: whether there is anything in it, and any detail."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from PIL import Image

LOOKS_VERSION = 1  # raised whenever a measure of this file would come out otherwise
LOOK = np.dtype(
    [
        ("version", "<u4"),  # of the decoder's rules and of this file's
        ("spread", "<f4"),  # standard deviation of the levels, 0 to 127.5, largest of the three channels
        ("detail", "<f4"),  # see `detail_of`; -1 where it cannot be told
        ("lightest", "u1"),  # level of a mask's lightest pixel
        ("darkest", "u1"),  # of its darkest
        ("unused", "<u2"),
    ]
)
BLANK_SPREAD = 1.0  # levels; under it a picture is of one colour
SOFT_DETAIL = 0.008  # photographs have 0.012 and more, also as JPEG; enlarged twice, 0.0004 to 0.008
_CROP = 128  # pixels; side of the parts that detail is looked for in
_PLAIN_SPREAD = 6.0  # levels; smoother parts tell nothing


def look_at_picture(image: Image.Image) -> npt.NDArray[np.void]:
    """The record (shape ()) of a decoded RGB picture."""
    look = np.zeros((), LOOK)
    small = np.asarray(image.reduce(max(1, min(image.size) // 128)), np.float32)
    look["spread"] = small.reshape(-1, 3).std(0).max()
    look["detail"] = detail_of(image)
    return look


def look_at_mask(image: Image.Image) -> npt.NDArray[np.void]:
    """The record (shape ()) of a decoded grey mask."""
    look = np.zeros((), LOOK)
    look["darkest"], look["lightest"] = image.getextrema()
    return look


def detail_of(image: Image.Image) -> float:
    """Mean spectral power of the finest detail (0.32 to 0.46 cycles a pixel) by that of middling detail (0.12 to 0.2).

    A picture that was enlarged to twice its size has next to none of the first. The median over five parts of 128 x
    128 pixels; -1 if the picture is too small or all parts are plain.
    """
    width, height = image.size
    if min(width, height) < 2 * _CROP:
        return -1.0
    parts = []
    for across, down in _PLACES:
        left, top = round(across * (width - _CROP)), round(down * (height - _CROP))
        part = np.asarray(image.crop((left, top, left + _CROP, top + _CROP)).convert("L"), np.float32)
        if part.std() > _PLAIN_SPREAD:
            parts.append(part - part.mean())
    if not parts:
        return -1.0
    power = np.abs(np.fft.rfft2(np.stack(parts) * _WINDOW)) ** 2
    return float(np.median(power[:, _FINE].mean(1) / np.maximum(power[:, _MIDDLING].mean(1), 1e-9)))


_PLACES = ((0.5, 0.5), (0.25, 0.25), (0.75, 0.25), (0.25, 0.75), (0.75, 0.75))
_hann = np.hanning(_CROP + 2)[1:-1].astype(np.float32)
_WINDOW = np.outer(_hann, _hann)
_cycles = np.maximum(np.abs(np.fft.fftfreq(_CROP))[:, None], np.fft.rfftfreq(_CROP)[None, :])
_FINE = (_cycles > 0.32) & (_cycles <= 0.46)
_MIDDLING = (_cycles > 0.12) & (_cycles <= 0.2)
