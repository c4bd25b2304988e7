"""Tables, and numbers as people read them, beside those of `quantities`."""

from __future__ import annotations

from collections.abc import Sequence

from qwen_edit_zero.planning.wording.quantities import show_seconds


def show_data(size: float) -> str:
    """Bytes that travel or lie on a disk: `245 GB`."""
    return _scaled(size, ("B", "kB", "MB", "GB", "TB", "PB"))


def show_flops(count: float) -> str:
    """`1.9 PFLOP`."""
    return _scaled(count, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP", "YFLOP"))


def show_number(value: float) -> str:
    """Two or three digits that matter, thousands set apart."""
    size = abs(value)
    if size >= 99.5:
        return f"{value:,.0f}"
    if size >= 0.995 or not size:
        return f"{value:.1f}"
    return f"{value:.2f}" if size >= 0.0995 else f"{value:.2g}"


def show_range(low: float, high: float, unit: str = "") -> str:
    """`5.8-8.2 samples/s`."""
    first, last = show_number(low), show_number(high)
    return (first if first == last else f"{first}-{last}") + (f" {unit}" if unit else "")


def show_times(low: float, high: float) -> str:
    """`5.8-8.2 s`, `50 min - 3.4 h`."""
    first, last = show_seconds(low), show_seconds(high)
    if first == last:
        return first
    number, unit = first.split(" ")
    return f"{number}-{last}" if last.endswith(f" {unit}") else f"{first} - {last}"


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, indent: str = "  ") -> str:
    """Columns of text: the first one left, the others right aligned. No headings: none are shown."""
    cells = [list(headings)] if headings else []
    cells += map(list, rows)
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]

    def line(row: Sequence[str]) -> str:
        first = f"{row[0]:<{widths[0]}}"
        others = [f"{cell:>{width}}" for cell, width in zip(row[1:], widths[1:], strict=True)]
        return (indent + "  ".join([first, *others])).rstrip()

    return "\n".join(map(line, cells))


def _scaled(value: float, units: Sequence[str]) -> str:
    unit = units[0]
    for unit in units:
        if abs(value) < 999.5 or unit == units[-1]:
            break
        value /= 1000
    return f"{value:.0f} {unit}" if unit == units[0] or value >= 99.5 else f"{value:.1f} {unit}"
