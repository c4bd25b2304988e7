"""`plan --sweep gpus=8,16,64 area=512,1024`: one recipe over numbers of GPUs and sizes of samples, as a table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from qwen_edit_zero.errors import SettingsError, UserError
from qwen_edit_zero.planning.hardware.clusters import MOST_RANKS, Cluster
from qwen_edit_zero.planning.jobs.job import make_job
from qwen_edit_zero.planning.jobs.wish import Wish, sample_of
from qwen_edit_zero.planning.plan import Plan, Verdict
from qwen_edit_zero.planning.wording.quantities import show_bytes
from qwen_edit_zero.planning.wording.units import show_range, show_times, table
from qwen_edit_zero.settings.load import load_settings
from qwen_edit_zero.settings.names import nearest

GPUS, AREA, REFERENCES, TEXT, MICRO = "gpus", "area", "references", "text_tokens", "micro"
AXES = {
    GPUS: "GPUs in all",
    AREA: "side of a square of as many pixels: 1024",
    REFERENCES: "references of a sample",
    TEXT: "tokens of the prompt",
    MICRO: "samples of a forward",
}
_MOST = {GPUS: MOST_RANKS, AREA: 4096, REFERENCES: 16, TEXT: 100_000, MICRO: 1024}
_MOST_ROWS = 500
_FITS = {Verdict.FITS: "yes", Verdict.TIGHT: "tight", Verdict.NOT: "no"}


@dataclass(frozen=True)
class Row:
    """A point of the sweep; `plan` is None where it cannot be, for the reason `why`."""

    point: Mapping[str, int]
    cluster: Cluster
    plan: Plan | None
    why: str = ""


def parse_axes(words: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """`gpus=8,16` and the like. Raises UserError for anything that is not an axis with whole numbers."""
    axes: dict[str, tuple[int, ...]] = {}
    for word in words:
        name, _, text = word.partition("=")
        if name not in AXES:
            near = nearest(name, list(AXES))
            hint = f"did you mean {near}?" if near else "settings of a recipe are written section.key=value"
            raise UserError(f"--sweep: {name!r} is no axis; there are {', '.join(AXES)}. {hint}")
        if name in axes:
            raise UserError(f"--sweep: {name} is given twice; write {name}={text},...")
        axes[name] = _numbers(name, text)
    if not axes:
        raise UserError(
            "--sweep needs an axis, such as gpus=8,16,32,64 or area=512,1024; there are: " + ", ".join(AXES)
        )
    if math.prod(map(len, axes.values())) > _MOST_ROWS:
        raise UserError(f"--sweep: these axes make more than {_MOST_ROWS} rows; leave some values out")
    return axes


def _numbers(name: str, text: str) -> tuple[int, ...]:
    values = []
    for part in text.split(","):
        if not (part.isascii() and part.isdigit()) or not 1 <= int(part) <= _MOST[name]:
            raise UserError(
                f"--sweep: {name}={text}: {part!r} is no whole number from 1 to {_MOST[name]:,}; write them with "
                f"commas between, such as {name}=8,16"
            )
        values.append(int(part))
    return tuple(dict.fromkeys(values))


def sweep(wish: Wish, axes: Mapping[str, Sequence[int]]) -> list[Row]:
    """The plan of the recipe at each point; the engine and all its options are the recipe's.

    A batch that does not divide over the GPUs grows to the next multiple, so each GPU has a sample at least.
    """
    names = list(axes)
    return [_row(wish, dict(zip(names, values, strict=True))) for values in itertools.product(*axes.values())]


def _row(wish: Wish, point: Mapping[str, int]) -> Row:
    cluster = wish.gpus
    if GPUS in point:
        cluster = resized(cluster, point[GPUS])
    changes: list[str] = []
    try:
        base = wish.base.settings
        micro = point.get(MICRO, base.batch.micro_size)
        changes.append(f"batch.micro_size={micro}")
        round_ = micro * cluster.world // base.engine.sequence_parallel
        if round_ and base.batch.global_size % round_:
            changes.append(f"batch.global_size={-(-base.batch.global_size // round_) * round_}")
        if AREA in point:
            changes.append(f"data.vae_area={point[AREA] ** 2}")
        loaded = load_settings(
            wish.recipe,
            overrides=(*wish.overrides, *changes),
            engine=wish.engine,
            ds=wish.ds,
            world_size=cluster.world,
        )
        shape = replace(
            wish.shape,
            references=point.get(REFERENCES, wish.shape.references),
            text_tokens=point.get(TEXT, wish.shape.text_tokens),
        )
        job = make_job(
            loaded.settings,
            cluster_world=cluster.world,
            gpus_per_node=cluster.gpus_per_node,
            sample=sample_of(loaded.settings, shape, wish.facts),
            config=wish.config,
        )
        return Row(point, cluster, Plan(job, cluster, wish.known_samples, wish.price))
    except SettingsError as error:
        return Row(point, cluster, None, " ".join(str(error).split()))


def resized(cluster: Cluster, gpus: int) -> Cluster:
    """As many GPUs of the same kind: part of a node, or whole nodes. Raises UserError if they are neither."""
    if gpus <= cluster.gpus_per_node:
        return cluster.of(1, gpus)
    if gpus % cluster.gpus_per_node:
        raise UserError(
            f"--sweep: gpus={gpus} are no whole nodes of {cluster.gpus_per_node}; say with --gpus how many a node has"
        )
    return cluster.of(gpus // cluster.gpus_per_node, cluster.gpus_per_node)


def sweep_table(rows: Sequence[Row]) -> str:
    """One line a point; GPU-hours are of 1,000 samples."""
    names = list(rows[0].point)
    headings = [*names, "batch", "memory", "fits", "step", "samples/s", "GPU-h for 1,000"]
    cells = []
    notes: list[str] = []
    for row in rows:
        values = [f"{row.point[name]:,}" for name in names]
        if row.plan is None:
            notes += [row.why] if row.why not in notes else []
            cells.append([*values, *["-"] * 4, f"[{notes.index(row.why) + 1}]", "-"])
            continue
        plan, timing = row.plan, row.plan.timing
        assert timing is not None
        low, high = timing.samples_per_s
        hours = [row.cluster.world * 1000 / rate / 3600 for rate in (high, low)]
        cells.append(
            [
                *values,
                str(plan.job.settings.batch.global_size),
                show_bytes(plan.memory.peak[1]),
                _FITS[plan.verdict] if plan.verdict is not None else "-",
                show_times(*timing.step_s),
                show_range(low, high),
                show_range(hours[0], hours[1]),
            ]
        )
    lines = [table(headings, cells)]
    lines += [f"  [{number}] {why}" for number, why in enumerate(notes, 1)]
    return "\n".join(lines)


def write_svg(rows: Sequence[Row], path: Path) -> None:
    """Draw samples a second over the first axis, a line for each point of the others. Raises UserError."""
    from qwen_edit_zero.planning.wording.plot import Series, line_plot

    first, *others = list(rows[0].point)
    series: dict[str, list[tuple[float, float, float]]] = {}
    for row in rows:
        if row.plan is None or row.plan.timing is None:
            continue
        name = ", ".join(f"{key} {row.point[key]:,}" for key in others) or "samples/s"
        if not row.plan.fits:
            name += " (does not fit)"
        series.setdefault(name, []).append((row.point[first], *row.plan.timing.samples_per_s))
    if not series:
        raise UserError("--svg: none of the points can be, so there is nothing to draw")
    text = line_plot(
        [Series(name, tuple(sorted(points))) for name, points in series.items()],
        title=f"Samples a second on {rows[0].cluster.accelerator.name}, low to high",
        x=AXES[first],
        y="samples/s",
    )
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--svg: {path} cannot be written: {error.strerror or error}") from error
