"""Sizes and rates as people write them: "39.4 GiB", "25GB/s", "200Gb/s", "312 TFLOP/s"."""

from __future__ import annotations

import math
import re

GIB = 1024**3
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "p": 1e15}
_BINARY = {"k": 1024.0, "m": 1024.0**2, "g": 1024.0**3, "t": 1024.0**4}
_FORM = re.compile(r"([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([kKmMgGtTpP]?)(i?)(FLOPS?|bit|bits|b|B)?(/s|ps)?")


def read_bytes(text: str) -> int:
    """Bytes of "80 GiB" or "1TB". Raises ValueError, saying what is wanted."""
    number, kind, per_second = _read(text)
    if kind != "bytes" or per_second or number < 1:
        raise ValueError(f"{text!r} is no size; write one like 80GiB or 1TB")
    return round(number)


def read_bytes_per_second(text: str) -> float:
    """Bytes a second of "25GB/s", "200Gb/s" (bits) or "200Gbps". Raises ValueError, saying what is wanted."""
    number, kind, per_second = _read(text)
    if not per_second or kind not in ("bytes", "bits") or number <= 0:
        raise ValueError(f"{text!r} is no rate; write bytes like 25GB/s, or bits like 200Gb/s")
    return number / 8 if kind == "bits" else number


def read_flops(text: str) -> float:
    """FLOP a second of "312 TFLOP/s" or "312 TFLOPS". Raises ValueError, saying what is wanted."""
    number, kind, _ = _read(text)
    if kind != "flop" or number <= 0:
        raise ValueError(f"{text!r} is no rate of arithmetic; write one like 312 TFLOP/s")
    return number


def _read(text: str) -> tuple[float, str, bool]:
    found = _FORM.fullmatch(text.strip())
    if not found or not math.isfinite(float(found[1])):
        return math.nan, "", False
    prefix, unit = found[2].lower(), found[4] or ""
    if found[3] and prefix not in _BINARY:
        return math.nan, "", False
    factor = _BINARY[prefix] if found[3] else _PREFIXES[prefix]
    kind = {"B": "bytes", "b": "bits", "bit": "bits", "bits": "bits", "FLOP": "flop", "FLOPS": "flop"}.get(unit, "")
    return float(found[1]) * factor, kind, found[5] is not None


def show_bytes(size: float) -> str:
    """`61.3 GiB`, `512 MiB`: three digits, in the unit that fits."""
    for unit, factor in (("TiB", 1024.0**4), ("GiB", 1024.0**3), ("MiB", 1024.0**2), ("KiB", 1024.0)):
        if abs(size) >= factor:
            value = size / factor
            return f"{value:.0f} {unit}" if value >= 99.95 else f"{value:.1f} {unit}"
    return f"{size:.0f} B"


def show_seconds(seconds: float) -> str:
    """`0.82 s`, `5.8 s`, `12 min`, `3.4 h`, `2.1 days`."""
    if seconds < 1:
        return f"{seconds:.2f} s"
    for unit, factor, most in (("s", 1.0, 120.0), ("min", 60.0, 7200.0), ("h", 3600.0, 172800.0)):
        if seconds < most:
            value = seconds / factor
            return f"{value:.0f} {unit}" if value >= 9.95 else f"{value:.1f} {unit}"
    return f"{seconds / 86400:.1f} days"
