"""Measurements that others published, and what the planner says of the job that comes nearest to each."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qwen_edit_zero.planning.costs.timing import Range, timing
from qwen_edit_zero.planning.engines.kinds import Kind, Phase
from qwen_edit_zero.planning.engines.memory import memory
from qwen_edit_zero.planning.hardware.clusters import Cluster, parse_gpus
from qwen_edit_zero.planning.jobs.job import Job, make_job
from qwen_edit_zero.planning.jobs.tokens import SampleShape
from qwen_edit_zero.planning.wording.quantities import read_bytes
from qwen_edit_zero.settings.load import load_settings
from qwen_edit_zero.settings.models import Settings

_FILE = Path(__file__).parent / "published.yaml"
_ANY_FULL = Path("recipes/full_finetune.yaml")
_TRAINING = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)
_NOT_ALLOCATED = (Kind.CONTEXT, Kind.COMMUNICATORS, Kind.FRAGMENTATION)


@dataclass(frozen=True)
class Measurement:
    """One of `published.yaml`, which says what the fields mean.

    Attributes:
        jobs: the job that comes nearest; two of them where the measurement is of a difference.
        memory: bytes that were measured (of the second job beyond the first, if there are two); None: not measured.
    """

    name: str
    trainer: str
    source: str
    setup: str
    differs: str
    assumed: str
    cluster: Cluster
    jobs: tuple[Job, ...]
    times: Mapping[Kind, float]
    plus: int
    allocated_only: bool
    memory: int | None
    seconds: float | None
    fits: bool | None


@dataclass(frozen=True)
class Prediction:
    """What the planner says of a measurement; None where it was not measured.

    Attributes:
        memory: bytes.
        memory_error: predicted over measured, less 1.
        seconds: (low, high) of a step.
        seconds_error: how far the measured time is outside of the range, as a share of the nearer end; 0: inside.
        fits: whether the job has room.
    """

    memory: int | None = None
    memory_error: float | None = None
    seconds: Range | None = None
    seconds_error: float | None = None
    fits: bool | None = None


def predict(measurement: Measurement) -> Prediction:
    """The planner's figures for what was measured."""
    peaks = [_peak(job, measurement) for job in measurement.jobs]
    size = error = None
    if measurement.memory is not None:
        size = peaks[-1] - (peaks[0] if len(peaks) > 1 else 0)
        error = size / measurement.memory - 1
    seconds = late = None
    if measurement.seconds is not None:
        seconds = timing(measurement.jobs[-1], measurement.cluster).step_s
        nearer = min(max(measurement.seconds, seconds[0]), seconds[1])
        late = measurement.seconds / nearer - 1
    fits = None if measurement.fits is None else peaks[-1] <= measurement.cluster.accelerator.memory
    return Prediction(size, error, seconds, late, fits)


def _peak(job: Job, measurement: Measurement) -> int:
    """Bytes of a rank at its worst, with the trainer's own factors."""
    device = memory(job, measurement.cluster.accelerator).device
    # What was measured has no margin in it; whether a job has room is asked with it.
    left_out = _NOT_ALLOCATED if measurement.allocated_only else ()
    if measurement.fits is None:
        left_out = (*left_out, Kind.FRAGMENTATION)
    sums = [
        sum(size * measurement.times.get(kind, 1.0) for kind, size in device[phase].items() if kind not in left_out)
        for phase in _TRAINING
    ]
    return round(max(sums)) + measurement.plus


@functools.cache
def published() -> tuple[Measurement, ...]:
    """All measurements that the planner has something to say of."""
    return tuple(_measurement(entry) for entry in _content()["measurements"])


def not_modelled() -> tuple[Mapping[str, str], ...]:
    """Measurements of what the planner's formulas are not for: setup, source, measured, why."""
    return tuple(_content()["not_modelled"])


def rates() -> tuple[Mapping[str, Any], ...]:
    """Shares of the peak rate that published trainings reached: what, useful, hardware (if known), source."""
    return tuple(_content()["rates"])


@functools.cache
def _content() -> dict[str, Any]:
    content: dict[str, Any] = yaml.load(
        _FILE.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    )
    return content


def _measurement(entry: Mapping[str, Any]) -> Measurement:
    cluster = parse_gpus(entry["gpus"])
    measured = entry["measured"]
    size = measured.get("memory", measured.get("more"))
    return Measurement(
        name=entry["id"],
        trainer=entry["trainer"],
        source=entry["source"],
        setup=entry["setup"],
        differs=entry["differs"],
        assumed=entry["assumed"],
        cluster=cluster,
        jobs=tuple(_job(entry, more, cluster) for more in ({}, *([entry["after"]] if "after" in entry else []))),
        times={Kind(kind): factor for kind, factor in entry.get("times", {}).items()},
        plus=read_bytes(entry["plus"]) if "plus" in entry else 0,
        allocated_only=entry.get("counts") == "allocated",
        memory=None if size is None else read_bytes(size),
        seconds=measured.get("seconds"),
        fits=measured.get("fits"),
    )


def _job(entry: Mapping[str, Any], more: Mapping[str, Any], cluster: Cluster) -> Job:
    given: dict[str, Any] = {**entry["settings"], **more}
    if "deepspeed" in entry:
        said = [f"{name}.{key}={value}" for name, section in given.items() for key, value in section.items()]
        path = Path(entry["deepspeed"])
        settings = load_settings(_ANY_FULL, overrides=said, ds=path, world_size=cluster.world).settings
    else:
        settings = Settings(**{"run": {"max_steps": 1}, **given})
    sample = entry["sample"]
    shape = SampleShape(
        tuple(sample["target"]), tuple(tuple(grid) for grid in sample["references"]), sample["text_tokens"]
    )
    return make_job(settings, cluster_world=cluster.world, gpus_per_node=cluster.gpus_per_node, sample=shape)
