"""Numbers and foreign text as reports show them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from qwen_edit_zero.edit_data.check.findings import Finding, Found
from qwen_edit_zero.edit_data.check.summary import Histogram

WITHOUT = "(none)"  # of a category


def plain(text: str, most: int = 300) -> str:
    """Text of a manifest on one line: what is not printable is escaped, and what is too long is cut."""
    readable = text.encode("utf-8", "backslashreplace").decode("utf-8")
    cut = readable if len(readable) <= most else readable[: most - 1] + "…"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in cut)


def share(count: int, of: int) -> str:
    """`12.3 %`; of something small `< 0.1 %`."""
    if not of:
        return ""
    part = count / of
    return "< 0.1 %" if 0 < part < 0.0005 else f"{part:.1%}".replace("%", " %")


def place(finding: Finding) -> str:
    """`line 7 (id x)`."""
    return f"{plain(finding.where, 120)} (id {plain(finding.id, 60)})" if finding.id else plain(finding.where, 120)


def labels(histogram: Histogram) -> list[str]:
    """The names of a histogram's parts; of whole numbers both ends belong to them."""
    edges = histogram.edges
    names = []
    for low, high in pairwise(edges):
        if low == 0:
            names.append(f"< {_short(high)}")
        elif high >= 1e8:
            names.append(f"{_short(low)} +")
        else:
            names.append(f"{_short(low)}-{_short(high - 1 if histogram.whole else high)}")
    return names


def seconds(value: float) -> str:
    """`0.8 s`, `83 s`, `12 min`, `3.2 h`."""
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.1f} h"


def reasons(found: Found, most: int) -> Sequence[tuple[str, int]]:
    """The most frequent reasons of refusals; none where there is only one."""
    return found.reasons.most_common(most) if len(found.reasons) > 1 else []


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 16 or math.isclose(value, round(value)) else f"{value:g}"
