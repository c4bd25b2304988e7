"""Ranges over numbers as an SVG of two logarithmic axes; nothing is needed to write or to show it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from qwen_edit_zero.planning.wording.units import show_number

_WIDTH, _HEIGHT, _LEFT, _TOP, _BOTTOM = 760, 440, 70, 40, 50
_RIGHT = 200  # room for the legend
_COLOURS = ("#1f5fbf", "#c8322b", "#2d8a4e", "#b8860b", "#6a4fb3", "#0f8b8d", "#8c564b", "#6d7681")
_DASHES = ("", "6 3", "2 3")


@dataclass(frozen=True)
class Series:
    """A line: points (x, low, high), by x."""

    name: str
    points: tuple[tuple[float, float, float], ...]


def line_plot(series: Sequence[Series], *, title: str, x: str, y: str) -> str:
    """The text of an SVG: of each series a band from low to high, and a line in the middle of it."""
    xs = [point[0] for line in series for point in line.points]
    ys = [value for line in series for point in line.points for value in point[1:]]
    across, up = _Axis(xs, _LEFT, _WIDTH - _RIGHT), _Axis(ys, _HEIGHT - _BOTTOM, _TOP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="12" role="img" aria-label="{escape(title)}">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="22" font-size="15">{escape(title)}</text>',
    ]
    parts += _grid(across, up, sorted(set(xs)))
    parts += [
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(x)}</text>',
        f'<text x="16" y="{(_TOP + _HEIGHT - _BOTTOM) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 16 {(_TOP + _HEIGHT - _BOTTOM) / 2})">{escape(y)}</text>',
    ]
    for number, line in enumerate(series):
        parts += _line(line, number, across, up)
    return "\n".join([*parts, "</svg>", ""])


class _Axis:
    """From a number to a place, on a logarithmic scale."""

    def __init__(self, values: Sequence[float], start: float, end: float) -> None:
        low, high = math.log(min(values)), math.log(max(values))
        rest = 0.05 * (high - low) or 0.5
        self.low, self.high = low - rest, high + rest
        self._start, self._end = start, end

    def at(self, value: float) -> float:
        """Where a number is."""
        share = (math.log(value) - self.low) / (self.high - self.low)
        return round(self._start + share * (self._end - self._start), 1)

    def ticks(self) -> list[float]:
        """1, 2 and 5 times powers of ten inside."""
        low, high = math.exp(self.low), math.exp(self.high)
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        return [m * 10.0**p for p in powers for m in (1, 2, 5) if low <= m * 10.0**p <= high]


def _grid(across: _Axis, up: _Axis, xs: Sequence[float]) -> list[str]:
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    parts = [
        f'<rect x="{_LEFT}" y="{_TOP}" width="{right - _LEFT}" height="{bottom - _TOP}" fill="none" stroke="#aab2ba"/>'
    ]
    for value in xs:
        place = across.at(value)
        parts.append(f'<line x1="{place}" y1="{_TOP}" x2="{place}" y2="{bottom}" stroke="#e8ebee"/>')
        parts.append(f'<text x="{place}" y="{bottom + 16}" text-anchor="middle">{value:,.0f}</text>')
    for value in up.ticks():
        place = up.at(value)
        parts.append(f'<line x1="{_LEFT}" y1="{place}" x2="{right}" y2="{place}" stroke="#e8ebee"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{place + 4}" text-anchor="end">{show_number(value)}</text>')
    return parts


def _line(line: Series, number: int, across: _Axis, up: _Axis) -> list[str]:
    colour, dash = _COLOURS[number % len(_COLOURS)], _DASHES[number // len(_COLOURS) % len(_DASHES)]
    high = [f"{across.at(x)},{up.at(top)}" for x, _, top in line.points]
    low = [f"{across.at(x)},{up.at(bottom)}" for x, bottom, _ in reversed(line.points)]
    middle = [(across.at(x), up.at(math.sqrt(bottom * top))) for x, bottom, top in line.points]
    path = " ".join(f"{x},{y}" for x, y in middle)
    dashes = f' stroke-dasharray="{dash}"' if dash else ""
    legend_y = _TOP + 12 + 18 * number
    left = _WIDTH - _RIGHT + 12
    return [
        f'<polygon points="{" ".join([*high, *low])}" fill="{colour}" opacity="0.15"/>',
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>',
        *(f'<circle cx="{x}" cy="{y}" r="3" fill="{colour}"/>' for x, y in middle),
        f'<line x1="{left}" y1="{legend_y - 4}" x2="{left + 18}" y2="{legend_y - 4}" stroke="{colour}" '
        f'stroke-width="2"{dashes}/>',
        f'<text x="{left + 24}" y="{legend_y}">{escape(line.name)}</text>',
    ]
