"""Metrics of a run: an object a step and a held-out loss in `RUN/metrics.jsonl`, an epoch in `RUN/drawn.jsonl`, and
TensorBoard."""

from __future__ import annotations

import json
import math
import os
import resource
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from qwen_edit_zero.training.held_out_records import HELD_OUT, held_out_records

METRICS_FILE, DRAWN_FILE = "metrics.jsonl", "drawn.jsonl"


@dataclass(frozen=True)
class StepMetrics:
    """What is recorded of one optimizer step.

    Attributes:
        step: number of optimizer steps done, this one included (1-based).
        epoch: epoch the step's samples belong to (0-based).
        samples_seen: samples trained on since the run began, over all ranks.
        loss: mean over the samples of the step's global batch.
        grad_norm: global norm before clipping; NaN or infinite if the step was skipped.
        lr: learning rate of the step.
        step_seconds: wall-clock time of the step, waiting for data included.
        samples_per_second: of all ranks together.
        data_seconds: time the step waited for data, on rank 0.
        imbalance: how much more the rank with the most to do computes than if the step's samples were spread evenly
            over all ranks without padding and fillers, as a fraction; see `edit_data.batches.split`.
        tflops_per_device: model FLOP (3x forward; recomputation not counted) a second and device, in 1e12.
        memory_peak_bytes: peak device memory allocated on rank 0 (on CPU: peak resident set of the process).
        skipped: True if nothing was updated: the gradient was not finite, or the guard would not have it.
        guarded: it was the guard that would not have the step.
        skip_reason: which samples or parameters were not finite; only in the lines of skipped steps.
        loss_scale: fp16 loss scale; 1 in other precisions.
    """

    step: int
    epoch: int
    samples_seen: int
    loss: float
    grad_norm: float
    lr: float
    step_seconds: float
    samples_per_second: float
    data_seconds: float
    imbalance: float
    tflops_per_device: float
    memory_peak_bytes: int
    skipped: bool = False
    loss_scale: float = 1.0
    skip_reason: str | None = None
    guarded: bool = False


def memory_peak_bytes(device: torch.device) -> int:
    """Peak memory allocated on a CUDA device, or the peak resident set size of this process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def to_json_line(metrics: StepMetrics) -> str:
    """One line of strict JSON: what is not finite becomes null, which every JSON reader understands."""
    values: dict[str, Any] = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in asdict(metrics).items()
    }
    if metrics.skip_reason is None:
        del values["skip_reason"]
    if not metrics.guarded:
        del values["guarded"]
    return json.dumps(values, allow_nan=False)


class MetricsWriter:
    """Appends to `RUN/metrics.jsonl`, `RUN/drawn.jsonl` and TensorBoard's event file; used on rank 0 only.

    On resuming at `first_step` (steps already done) later lines of a run that died after its last checkpoint are
    dropped, so that every step stands in the file once.

    Attributes:
        held_out: the lines about held-out losses that stay, in order.
    """

    def __init__(self, run_folder: Path, *, first_step: int, tensorboard: bool) -> None:
        self._path = run_folder / METRICS_FILE
        self._drawn_path = run_folder / DRAWN_FILE
        for path in (self._path, self._drawn_path):
            _drop_steps_after(path, first_step if first_step > 0 else -1)  # a new run has no value of step 0 either
        self.held_out = held_out_records(self._path) if self._path.exists() else []
        self._file = self._path.open("a", encoding="utf-8")
        self._board: Any = None
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(run_folder / "tensorboard"), purge_step=first_step + 1)

    def write(self, metrics: StepMetrics) -> None:
        """Record one step; the line is on its way to disk when this returns."""
        self._file.write(to_json_line(metrics) + "\n")
        self._file.flush()
        if self._board is not None:
            for key, value in asdict(metrics).items():
                if key not in ("step", "skipped", "skip_reason", "guarded"):
                    self._board.add_scalar(f"train/{key}", value, metrics.step)

    def write_held_out(self, record: Mapping[str, Any]) -> None:
        """Record a held-out loss, as `validation.to_record` gives it."""
        self._file.write(json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()
        if self._board is not None:
            step = record["step"]
            self._board.add_scalar("held_out/loss", record[HELD_OUT], step)
            for part, title in (("sigma", "noise level"), ("category", "category")):
                for name, value in record[f"held_out_by_{part}"].items():
                    self._board.add_scalar(f"held_out/{title} {name or 'none'}", value, step)

    def write_drawn(self, drawn: Mapping[str, int], *, epoch: int, step: int) -> None:
        """Record how many samples of each category an epoch, ended by `step` (1-based), drew."""
        total = sum(drawn.values())
        line = json.dumps({"step": step, "epoch": epoch, "samples": total, "drawn": dict(drawn)}, ensure_ascii=False)
        with self._drawn_path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        if self._board is not None:
            for category, count in drawn.items():
                self._board.add_scalar(f"drawn/{category or 'without category'}", count / total, step)

    def close(self) -> None:
        """Flush and close the files."""
        self._file.close()
        if self._board is not None:
            self._board.close()


def _finite(value: Any) -> Any:
    """The same with null for what is not finite."""
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _drop_steps_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            recorded = json.loads(line)["step"]
        except (ValueError, KeyError, TypeError):
            continue  # the line a dying process was writing
        if recorded <= step:
            kept.append(line + "\n")
    temporary = path.with_suffix(".jsonl.partial")
    temporary.write_text("".join(kept), encoding="utf-8")
    os.replace(temporary, path)
