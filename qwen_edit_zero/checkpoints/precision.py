"""Changing the floating-point type of raw tensor bytes with numpy, which has no bfloat16. Imports no torch."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


class OverflowingValue(Exception):
    """A finite value that the target type would turn into an infinity."""

    def __init__(self, value: float) -> None:
        super().__init__(value)
        self.value = value


def output_dtype(stored: str, wanted: str) -> str:
    """Floating-point tensors get the wanted type; integers, booleans and 8-bit floats keep theirs."""
    return wanted if stored in FLOATS else stored


def convert(data: Bytes, source: str, target: str) -> Bytes:
    """The same numbers in another type, rounded to nearest, ties to even; NaN stays NaN and infinity infinity.

    Equal types give the same bytes, NaN payloads included. Raises OverflowingValue.
    """
    return data if source == target else from_float32(to_float32(data, source), target)


def to_float32(data: Bytes, source: str) -> Floats:
    """Decode; exact except for F64."""
    if source == "BF16":
        return (data.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if source == "F64":
        wide = data.view(np.float64)
        with np.errstate(over="ignore"):
            narrow = wide.astype(np.float32)
        _refuse_overflow(wide, narrow)
        return narrow
    return data.view({"F32": np.float32, "F16": np.float16}[source]).astype(np.float32, copy=False)


def from_float32(values: Floats, target: str) -> Bytes:
    """Encode. Raises OverflowingValue."""
    if target == "F32":
        return values.view(np.uint8)
    if target == "F16":
        with np.errstate(over="ignore"):
            half = values.astype(np.float16)
        _refuse_overflow(values, half)
        return half.view(np.uint8)
    assert target == "BF16", target
    return _to_bfloat16(values).view(np.uint8)


_BF16_END = np.array(0x7F7F8000, dtype=np.uint32).view(np.float32)  # from here on bfloat16 rounds to infinity


def _to_bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    """bfloat16 is the upper half of float32; adding 0x7fff, and 1 if the last kept bit is odd, rounds ties to even."""
    bits = values.view(np.uint32)
    rounded = bits >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += bits
    short = np.ascontiguousarray(rounded.view(np.uint16)[1::2])  # the upper halves, on a little-endian machine
    if len(values) == 0 or (values.max() < _BF16_END and values.min() > -_BF16_END):  # False if there is a NaN
        return short
    special = (bits & np.uint32(0x7F800000)) == np.uint32(0x7F800000)
    overflown = ((short & np.uint16(0x7FFF)) == np.uint16(0x7F80)) & ~special
    if overflown.any():
        raise OverflowingValue(float(values[overflown][0]))
    nan = np.isnan(values)  # the sum above may carry a NaN into an infinity or zero
    short[nan] = (bits[nan] >> np.uint32(16)).astype(np.uint16) | np.uint16(0x0040)
    return short


def _refuse_overflow(before: npt.NDArray[np.floating], after: npt.NDArray[np.floating]) -> None:
    overflown = np.isinf(after)
    if overflown.any():
        overflown &= np.isfinite(before)
        if overflown.any():
            raise OverflowingValue(float(before[overflown][0]))
