"""The result of a campaign as JSON, as Markdown and as a picture."""

from __future__ import annotations

import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engines.tables import Table
from benchmarks.faults import training
from qwen_edit_zero.checkpoints.layout import checkpoint_name

_COLOURS = ("#1f5fbf", "#c8322b", "#2e8b57", "#b8860b", "#7b4fa3", "#6d7681")
_MARKERS = "osD^v"


def result(run: Path, calm: Path, measured: dict[str, Any]) -> dict[str, Any]:
    """Everything that was measured. Compares the disturbed run with the calm one, step by step and at the end."""
    rows, expected = training.recorded(run), training.recorded(calm)
    last = training.last_common_checkpoint(run, calm)
    a, b = (path / "checkpoints" / checkpoint_name(last) for path in (run, calm))
    same = sum(
        str(rows[step][key]) == str(expected[step][key]) for step in range(1, last + 1) for key in ("loss", "grad_norm")
    )
    told = training.events(run)
    skipped = [event["step"] for event in told if event["event"] == "skipped"]
    computing = [row["step_seconds"] for row in expected.values()]
    outcomes, seconds = measured["outcomes"], measured["seconds"]
    return measured | {
        "steps": len(rows),
        "faults": len(outcomes),
        "survived": sum(outcome["survived"] for outcome in outcomes),
        "compared_step": last,
        "largest_difference": training.largest_difference(a, b),
        "same_losses": same / (2 * last),
        "bad_sample_steps": len(set(skipped)),
        "starts": max(event["start"] for event in told),
        "effective": sum(row["step_seconds"] for row in rows.values()) / seconds,
        "done_again": sum(outcome["lost_steps"] for outcome in outcomes),
        "step_seconds": statistics.median(row["step_seconds"] for row in rows.values()),
        "calm_step_seconds": statistics.median(computing),
    }


def markdown(found: dict[str, Any]) -> str:
    """A summary, and a table with a row for each kind of fault."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    for outcome in found["outcomes"]:
        kinds.setdefault(outcome["kind"], []).append(outcome)
    rows = [_row(kind, members) for kind, members in sorted(kinds.items(), key=lambda item: -len(item[1]))]
    worst = max(found["largest_difference"].values())
    equal = "equal to the bit" if worst == 0 else f"differ by at most {worst:.3g}"
    notes = (
        f"{found['faults']} faults in {found['seconds'] / 60:.1f} minutes, seed {found['seed']}, {found['engine']}; "
        f"{found['survived']} survived ({found['survived'] / found['faults']:.0%}). {found['starts']} starts, "
        f"{found['steps']} steps. Weights and moments of the disturbed and the calm run after step "
        f"{found['compared_step']}: {equal}; losses and gradient norms of all steps that are the same to the bit: "
        f"{found['same_losses']:.1%}. A sample whose latents are "
        f"NaN was met and its step skipped {found['bad_sample_steps']} times, in both runs alike. Effective training "
        f"time (steps that count, of the time from the first start to the last): {found['effective']:.0%}; "
        f"{found['done_again']} steps were done twice. "
        f"Ends that no fault had been made for: {found['unplanned']}."
    )
    columns = [
        "fault", "number", "survived", "job went on", "all gone, s: mean (max)", "next new step, s: mean (max)",
        "steps done again: mean (max)", "launcher's status", "last lines name rank, host, cause",
    ]  # fmt: skip
    return Table("Fault campaign", columns, rows, textwrap.fill(notes, 120)).markdown()


def _row(kind: str, members: Sequence[dict[str, Any]]) -> list[object]:
    gone = [m["gone_seconds"] for m in members if m["gone_seconds"] is not None]
    ended = [m for m in members if not m["went_on"]]
    statuses = sorted({str(m["status"]) for m in ended if m["status"] is not None})
    named = [m["named"] for m in members if m["named"] is not None]
    return [
        kind,
        len(members),
        sum(m["survived"] for m in members),
        sum(m["went_on"] for m in members),
        _mean_max(gone),
        _mean_max([m["next_step_seconds"] for m in members if m["next_step_seconds"] is not None]),
        _mean_max([m["lost_steps"] for m in ended]),
        ", ".join(statuses) or "-",
        f"{sum(named)} of {len(named)}" if named else "-",
    ]


def _mean_max(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.1f} ({max(values):g})" if values else "-"


def picture(found: dict[str, Any], out: Path) -> None:
    """Steps over time, with a mark at each fault, as one PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.8), dpi=110, layout="constrained")
    canvas = FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    times = [time / 60 for time, _ in found["points"]]
    axes.step(times, [step for _, step in found["points"]], where="post", color="#6d7681", linewidth=1.2)
    kinds = list(dict.fromkeys(outcome["kind"] for outcome in found["outcomes"]))
    for i, kind in enumerate(sorted(kinds)):
        members = [outcome for outcome in found["outcomes"] if outcome["kind"] == kind]
        axes.plot(
            [m["at"] / 60 for m in members], [m["step"] for m in members], linestyle="none", markersize=7,
            marker=_MARKERS[i // len(_COLOURS) % len(_MARKERS)], color=_COLOURS[i % len(_COLOURS)], label=kind,
        )  # fmt: skip
    axes.set_xlabel("minutes")
    axes.set_ylabel("last recorded step")
    axes.set_title(
        f"{found['faults']} faults on three nodes, {found['survived']} survived, {found['done_again']} of "
        f"{found['steps']} steps done twice",
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", frameon=False, fontsize=8)
    canvas.print_figure(out)
