"""Bars as inline SVG: counts beside names, no script and nothing to load."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from qwen_edit_zero.edit_data.check.wordings import share

_ROW, _BAR, _NAME, _WIDTH = 20, 12, 170, 520


def bars(rows: Sequence[tuple[str, int]], total: int, *, title: str) -> str:
    """A horizontal bar a row; counts and shares are written beside them, so that nothing depends on colour."""
    most = max((count for _, count in rows), default=0)
    height = _ROW * len(rows)
    parts = [
        f'<svg class="bars" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" height="{height}" role="img" '
        f'aria-label="{escape(title)}">'
    ]
    space = _WIDTH - _NAME - 110
    for i, (name, count) in enumerate(rows):
        y = i * _ROW
        long = round(space * count / most, 1) if most else 0
        parts.append(
            f"<g><title>{escape(name)}: {count:,}</title>"
            f'<text x="{_NAME - 8}" y="{y + 14}" text-anchor="end">{escape(_fitting(name))}</text>'
            f'<rect x="{_NAME}" y="{y + 4}" width="{max(long, 1 if count else 0)}" height="{_BAR}" rx="2"/>'
            f'<text class="count" x="{_NAME + long + 6}" y="{y + 14}">{count:,}'
            f'<tspan class="share" dx="6">{share(count, total)}</tspan></text></g>'
        )
    return "".join([*parts, "</svg>"])


def _fitting(name: str) -> str:
    """Cut where it would not fit; Chinese characters are twice as wide."""
    room = 25
    kept: list[str] = []
    for character in name:
        room -= 2 if ord(character) > 0x2E7F else 1
        if room < 0:
            return "".join(kept[:-1]) + "…"
        kept.append(character)
    return name
