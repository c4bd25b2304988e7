"""What a run measured (RUN/measured.json) beside what the planner says of the same run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.planning.engines.kinds import Kind, Phase
from qwen_edit_zero.planning.engines.layout import rows_part, sub_groups
from qwen_edit_zero.planning.engines.state import state
from qwen_edit_zero.planning.evidence.measured import Measured
from qwen_edit_zero.planning.hardware.clusters import Cluster, accelerator_of_device
from qwen_edit_zero.planning.jobs.job import Job, make_job
from qwen_edit_zero.planning.jobs.tokens import SampleShape
from qwen_edit_zero.planning.jobs.trainable import without_gradient
from qwen_edit_zero.planning.plan import Plan
from qwen_edit_zero.planning.wording.quantities import show_bytes, show_seconds
from qwen_edit_zero.planning.wording.units import show_times, table
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.settings.yaml_source import read_yaml

SETTINGS_FILE = "settings.yaml"
_KINDS = {
    "parameters": Kind.PARAMETERS,
    "gathered": Kind.GATHERED,
    "masters": Kind.MASTERS,
    "moments": Kind.MOMENTS,
    "ema": Kind.EMA,
}
_PHASES = {"forward": Phase.FORWARD, "backward": Phase.BACKWARD, "step": Phase.STEP}
_NOT_ALLOCATED = (
    Kind.CONTEXT,
    Kind.COMMUNICATORS,
    Kind.FRAGMENTATION,
)  # torch counts none of them among what is allocated


@dataclass(frozen=True)
class Row:
    """A number of bytes, predicted and measured."""

    what: str
    predicted: int
    measured: int

    @property
    def error(self) -> float:
        """Predicted by measured, minus 1."""
        return self.predicted / self.measured - 1 if self.measured else float("inf") if self.predicted else 0.0


@dataclass(frozen=True)
class Comparison:
    """
    Attributes:
        state: what ranks hold between steps, kind by kind (gradients, but of ZeRO-1/2: after the last backward pass).
        peaks: device memory in use at the peak of each phase; empty on CPUs.
        step: seconds, predicted; None where the GPU is not known.
    """

    measured: Measured
    job: Job
    state: tuple[Row, ...]
    peaks: tuple[Row, ...]
    step: tuple[float, float] | None

    @property
    def total(self) -> Row:
        """The state together."""
        return Row("all of it", sum(row.predicted for row in self.state), sum(row.measured for row in self.state))


def compare_run(run: Path) -> Comparison:
    """Compare a run by its folder. Raises UserError if it has no measurements, or if its settings cannot be read."""
    measured = Measured.read(run)
    return compare(_settings(run / SETTINGS_FILE), measured)


def _settings(path: Path) -> Settings:
    """The settings that a run was trained with, which were checked then."""
    try:
        return Settings.model_validate_json(json.dumps(read_yaml(path, shown=str(path)).values), strict=True)
    except ValidationError as error:
        raise SettingsError(f"{path} was written by another version, or changed since: {error}") from error


def compare(settings: Settings, measured: Measured) -> Comparison:
    """Predict what was measured, for the largest micro-batch that was seen."""
    on_cpu = measured.device_bytes is None
    engine = settings.engine.model_copy(update={"device": "cpu"}) if on_cpu else settings.engine
    job = make_job(
        settings.model_copy(update={"engine": engine}),
        cluster_world=measured.ranks,
        gpus_per_node=measured.ranks_per_node,
        sample=SampleShape(measured.target, measured.references, measured.text_tokens),
        config=measured.config,
        padded=measured.is_padded,
    )
    plan = Plan(job, _cluster(measured))
    return Comparison(
        measured,
        job,
        tuple(_state(job, measured)),
        tuple(_peaks(plan, measured)),
        None if plan.timing is None else plan.timing.step_s,
    )


def _cluster(measured: Measured) -> Cluster | None:
    if measured.device_bytes is None:
        return None
    kind = accelerator_of_device(measured.device, memory=measured.device_bytes)
    if kind is None:
        return None
    nodes, on_node = -(-measured.ranks // measured.ranks_per_node), min(measured.ranks, measured.ranks_per_node)
    return Cluster(nodes, on_node, kind, kind.network, kind.host_memory * on_node)


def _state(job: Job, measured: Measured) -> Iterator[Row]:
    held = state(job)
    for host, name in ((False, ""), (True, ", in host memory")):
        if host and measured.device_bytes is None:
            return
        found = measured.host_state if host else measured.state
        for key, kind in _KINDS.items():
            predicted = (held.host if host else held.device).get(kind, 0)
            if measured.device_bytes is None:
                predicted += held.host.get(kind, 0)
            if predicted or found.get(key):
                yield Row(f"{kind}{name}", predicted, found.get(key, 0))
        # ZeRO-1/2 have flattened some gradients and hold others whole until they step.
        if (
            not host
            and job.kind not in ("zero1", "zero2")
            and (gradients := measured.state.get("gradients", 0) + measured.host_state.get("gradients", 0))
        ):
            yield Row(f"{Kind.GRADIENTS}, after the last backward pass", gradient_bytes(job), gradients)


def gradient_bytes(job: Job) -> int:
    """DDP, FSDP2, ZeRO-3: fp32 gradients of a rank when the last backward pass of a step has been reduced."""
    match job.kind:
        case "ddp":
            return 4 * job.trained_elements
        case "fsdp2":
            unused = set(without_gradient(job.trained, job.model.blocks))
            return 4 * sum(rows_part(p, job.shard_size) for p in job.trained if p not in unused)
        case _:
            return 4 * sum(sub_groups(job))


def _peaks(plan: Plan, measured: Measured) -> Iterator[Row]:
    for name, phase in _PHASES.items():
        kinds = plan.memory.device.get(phase)
        if kinds is not None and (found := measured.peaks.get(name)):
            yield Row(str(phase), sum(size for kind, size in kinds.items() if kind not in _NOT_ALLOCATED), found)


def comparison_line(found: Comparison) -> str:
    """One line for a run's output."""
    total, times = found.total, found.measured.times
    parts = [f"state {show_bytes(total.measured)} a rank, {show_bytes(total.predicted)} predicted ({total.error:+.1%})"]
    if found.peaks:
        top = max(found.peaks, key=lambda row: row.measured)
        parts.append(
            f"peak {show_bytes(top.measured)} at {top.what}, {show_bytes(top.predicted)} predicted ({top.error:+.1%})"
        )
    if times is not None:
        said = f"{show_seconds(times.median)} a step"
        parts.append(said if found.step is None else f"{said}, {show_times(*found.step)} predicted")
    return f"measured: {'; '.join(parts)}"


def comparison_text(found: Comparison) -> str:
    """Tables for a terminal."""
    measured = found.measured
    grids = " + ".join(f"{rows}x{columns}" for rows, columns in (measured.target, *measured.references))
    ranks = f"{measured.ranks} rank{'s' if measured.ranks > 1 else ''}"
    lines = [
        comparison_line(found),
        "",
        f"{found.job.name} on {ranks} ({measured.device}), steps {measured.first_step} to {measured.last_step}; "
        f"largest micro-batch: {measured.samples} x ({grids} + {measured.text_tokens} tokens)",
        "",
        "held by a rank",
        _table((*found.state, found.total)),
    ]
    if found.peaks:
        lines += ["", "device memory in use at the peak of", _table(found.peaks)]
    if measured.reserved:
        lines.append(f"  torch's allocator held {show_bytes(measured.reserved)} at most")
    if (times := measured.times) is not None:
        said = show_times(*found.step) if found.step else "not known for this device"
        lines += [
            "",
            f"a step: predicted {said}; measured {show_seconds(times.median)} (median of {times.count}, "
            f"{show_times(times.lowest, times.highest)}), {times.samples_per_second:.3g} samples/s, "
            f"{times.tflops_per_device:.3g} useful TFLOP/s a rank",
        ]
        if found.step:
            lines.append("  predicted for the largest samples; measured over all sizes that came")
    return "\n".join(lines)


def _table(rows: tuple[Row, ...]) -> str:
    cells = [[row.what, show_bytes(row.predicted), show_bytes(row.measured), f"{row.error:+.2%}"] for row in rows]
    return table(["", "predicted", "measured", "off by"], cells)


def comparison_json(found: Comparison) -> dict[str, Any]:
    """The same in bytes and seconds."""

    def rows(listed: tuple[Row, ...]) -> list[dict[str, Any]]:
        return [asdict(row) | {"error": row.error} for row in listed]

    return {
        "engine": found.job.kind,
        "ranks": found.measured.ranks,
        "device": found.measured.device,
        "state": rows((*found.state, found.total)),
        "peaks": rows(found.peaks),
        "step_seconds": {
            "predicted": found.step,
            "measured": None if found.measured.times is None else asdict(found.measured.times),
        },
    }
