"""Loss, gradient norm and learning rate over the steps of a run, as one PNG."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.training.held_out_records import HELD_OUT

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_Array = npt.NDArray[np.float64]

_POINTS = 1500  # more steps than this are averaged in bins before they are drawn
_BLUE, _PALE, _RED, _GREY, _ORANGE = "#1f5fbf", "#b9cdeb", "#c8322b", "#6d7681", "#e08a1e"


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl` in order of steps; of a step that was run again the last one counts.

    Lines that are no object with a whole `step` are left out: a process may have died while writing one. So are those
    about held-out losses (`metrics.held_out_records`).
    """
    by_step: dict[int, dict[str, Any]] = {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict) and isinstance(row.get("step"), int) and HELD_OUT not in row:
                by_step[row["step"]] = row
    return [by_step[step] for step in sorted(by_step)]


def loss_plot(
    rows: Sequence[dict[str, Any]], out: Path, *, title: str, held_out: Sequence[dict[str, Any]] = ()
) -> Path:
    """Draw the metrics of a run into the PNG `out` and return it.

    Args:
        held_out: records of held-out losses, drawn into the curve of the loss.

    Raises:
        ValueError: `rows` is empty.
    """
    if not rows:
        raise ValueError("no steps to draw")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    steps, loss = _column(rows, "step"), _column(rows, "loss")
    figure = Figure(figsize=(11, 6.4), dpi=120, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    grid = figure.add_gridspec(2, 2, height_ratios=[2.6, 1])
    main = figure.add_subplot(grid[0, :])
    norm = figure.add_subplot(grid[1, 0])
    rate = figure.add_subplot(grid[1, 1])

    x, y = _binned(steps, loss)
    smooth = _smoothed(y)
    few = len(steps) < 60
    main.plot(x, y, color=_PALE, linewidth=1, marker="o" if few else None, markersize=3, label="each step")
    main.plot(x, smooth, color=_BLUE, linewidth=2.2, label="smoothed")
    broken = steps[~np.isfinite(loss)]
    if len(broken):
        main.plot(
            broken, np.full(len(broken), 0.02), "|", color=_RED, markersize=10, markeredgewidth=1.5,
            transform=main.get_xaxis_transform(), label=f"loss not finite ({len(broken)} steps)",
        )  # fmt: skip
    tested, test_loss = _column(held_out, "step"), _column(held_out, "held_out_loss")
    if len(tested):
        main.plot(tested, test_loss, color=_ORANGE, linewidth=1.6, marker="o", markersize=4, label="held-out samples")
    main.set_ylabel("loss")
    main.legend(frameon=False, loc="upper right")
    _limit(main, y, test_loss)
    _title(main, title, rows, smooth, held_out)

    norms = _column(rows, "grad_norm")
    x, y = _binned(steps, norms)
    norm.plot(x, y, color=_BLUE, linewidth=1, marker="o" if few else None, markersize=2)
    positive = y[np.isfinite(y) & (y > 0)]
    if len(positive) and positive.max() > 30 * positive.min():
        norm.set_yscale("log")
    broken = steps[~np.isfinite(norms)]
    if len(broken):
        norm.plot(broken, np.full(len(broken), 0.04), "|", color=_RED, transform=norm.get_xaxis_transform())
    norm.set_title("gradient norm, before clipping", fontsize=10, color=_GREY, loc="left")

    rate.plot(
        *_binned(steps, _column(rows, "lr")), color=_BLUE, linewidth=1.5, marker="o" if few else None, markersize=2
    )
    rate.set_ylim(bottom=0)
    rate.yaxis.set_major_formatter(lambda value, _: f"{value:.3g}")
    rate.set_title("learning rate", fontsize=10, color=_GREY, loc="left")

    for axes in (main, norm, rate):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(color="#e8ebee", linewidth=0.7)
        axes.set_axisbelow(True)
        axes.set_xlabel("optimizer step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlim(min([*steps[:1], *tested[:1]]) - 0.5, steps[-1] + 0.5)
    temporary = out.with_name(f".{out.name}.partial")
    canvas.print_png(str(temporary))
    os.replace(temporary, out)
    return out


def _column(rows: Sequence[dict[str, Any]], name: str) -> _Array:
    """The values of one field; what is missing, null or no number is NaN, and so are infinities."""
    values = [row.get(name) for row in rows]
    array = np.array([v if isinstance(v, int | float) and not isinstance(v, bool) else math.nan for v in values], float)
    array[~np.isfinite(array)] = math.nan
    return array


def _binned(x: _Array, y: _Array) -> tuple[_Array, _Array]:
    """At most `_POINTS` points, each the mean of neighbouring ones, NaN left out."""
    if len(x) <= _POINTS:
        return x, y
    edges = np.linspace(0, len(x), _POINTS + 1).astype(int)[:-1]
    good = np.isfinite(y)
    sums = np.add.reduceat(np.where(good, y, 0.0), edges)
    counts = np.add.reduceat(good.astype(float), edges)
    sizes = np.diff(np.append(edges, len(x)))
    with np.errstate(invalid="ignore"):
        return np.add.reduceat(x, edges) / sizes, sums / counts


def _smoothed(y: _Array) -> _Array:
    """Mean under a Gaussian of a fiftieth of the run's length, NaN left out; NaN only where nothing is near."""
    width = max(1.0, len(y) / 50)
    reach = min(math.ceil(3 * width), len(y) - 1)
    kernel = np.exp(-0.5 * (np.arange(-reach, reach + 1) / width) ** 2)
    good = np.isfinite(y)
    total = np.convolve(np.where(good, y, 0.0), kernel)[reach : reach + len(y)]
    weight = np.convolve(good.astype(float), kernel)[reach : reach + len(y)]
    with np.errstate(invalid="ignore"):
        return np.where(weight > 1e-6, total / weight, math.nan)


def _limit(axes: Axes, y: _Array, also: _Array) -> None:
    """A few outliers of `y` must not flatten the rest of the curve; all of `also` is shown."""
    values = y[np.isfinite(y)]
    if len(values) < 20:
        return
    low, high = np.percentile(values, [0.5, 99.5])
    outliers = values.max() > high + 2 * (high - low) > 0
    shown = also[np.isfinite(also)]
    low, high = min([low, *shown]), max([high, *shown])
    if outliers:
        axes.set_ylim(low - 0.1 * (high - low), high + 0.4 * (high - low))


def _title(
    axes: Axes, title: str, rows: Sequence[dict[str, Any]], smooth: _Array, held_out: Sequence[dict[str, Any]]
) -> None:
    facts = [f"{len(rows):,} steps" if rows[0]["step"] == 1 else f"steps {rows[0]['step']:,} to {rows[-1]['step']:,}"]
    seen = rows[-1].get("samples_seen")
    if isinstance(seen, int):
        facts.append(f"{seen:,} samples")
    known = smooth[np.isfinite(smooth)]
    if len(known):
        facts.append(f"loss {known[0]:.4g} → {known[-1]:.4g} (smoothed)")
    losses = _column(held_out, "held_out_loss")
    if np.isfinite(losses).any():
        best = int(np.nanargmin(losses))
        facts.append(
            f"held-out {losses[0]:.4g} → {losses[-1]:.4g}, best {losses[best]:.4g} at {held_out[best]['step']:,}"
        )
    axes.set_title(title, fontsize=14, loc="left", pad=22)
    axes.text(0, 1.02, "  ·  ".join(facts), transform=axes.transAxes, fontsize=10, color=_GREY)
