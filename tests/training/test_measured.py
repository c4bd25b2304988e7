"""RUN/measured.json: what is counted, when it is written, and that it never fails a run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen_edit_zero.edit_data.batches.batch import EditBatch
from qwen_edit_zero.engines.ranks import Ranks
from qwen_edit_zero.planning.evidence.measured import Measured
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.training.measured import ENOUGH, WARM_UP, MeasuredHook, Measurements
from qwen_edit_zero.training.metrics import StepMetrics
from qwen_edit_zero.training.planned import tell_comparison


class HoldingEngine:
    """Holds one parameter, seen twice, its moments, and a gradient of which the storage is larger than the view."""

    name, device, ranks = "ddp", torch.device("cpu"), Ranks(0, 1)

    def __init__(self) -> None:
        self.master, self.moments, self.bucket = torch.zeros(100), torch.zeros(200), torch.zeros(150)

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from (("masters", self.master), ("masters", self.master[:50]), ("moments", self.moments))
        yield "gradients", self.bucket[:100]


def batch(samples: int, side: int, text: int) -> EditBatch:
    latents = torch.zeros(samples, 16, side, 2 * side)
    return EditBatch(latents, (latents,), torch.zeros(samples, text, 8), None, torch.ones(samples), ("a",) * samples, 0)


def metrics(step: int, seconds: float) -> StepMetrics:
    return StepMetrics(step, 0, step, 1.0, 1.0, 1e-3, seconds, 1 / seconds, 0.0, 0.0, 2.0, 1)


def train(hook: MeasuredHook, measurements: Measurements, steps: int) -> None:
    for step in range(1, steps + 1):
        for micro in (batch(2, 4, 5), batch(1, 8, 3)):
            measurements.after_forward(micro)
            measurements.after_backward(is_last=micro.target_latents.shape[0] == 1)
        measurements.after_step()
        hook.after_step(metrics(step, 100.0 if step <= WARM_UP else float(step)), is_last=step == steps)


def hook_of(folder: Path, told: list[Measured], **more: Any) -> tuple[MeasuredHook, Measurements]:
    measurements = Measurements(HoldingEngine(), **more)  # type: ignore[arg-type]
    return MeasuredHook(measurements, folder, rank=0, config={"a": 1}, first=0, tell=told.append), measurements


def test_storage_is_counted_once_and_the_largest_micro_batch_remembered(tmp_path: Path) -> None:
    told: list[Measured] = []
    hook, measurements = hook_of(tmp_path, told)
    train(hook, measurements, WARM_UP + 3)
    assert not (tmp_path / "measured.json").exists(), "written after enough steps, or at the end of the run"
    hook.write()
    found = Measured.read(tmp_path)
    assert told == [found]
    assert found.state == {"masters": 400, "moments": 800, "gradients": 600}
    assert (found.target, found.references, found.text_tokens, found.samples) == ((4, 8), ((4, 8),), 3, 1)
    assert (found.peaks, found.device, found.device_bytes) == ({}, "CPU", None)
    assert found.times is not None
    assert (found.times.count, found.times.median, found.times.highest) == (3, 4.0, 5.0), "without the warm-up"
    assert (found.first_step, found.last_step) == (1, WARM_UP + 3)


def test_it_is_written_after_the_first_steps_and_again_at_the_end_but_told_once(tmp_path: Path) -> None:
    told: list[Measured] = []
    hook, measurements = hook_of(tmp_path, told)
    train(hook, measurements, WARM_UP + ENOUGH + 4)
    assert [record.last_step for record in told] == [WARM_UP + ENOUGH]
    hook.write()
    assert Measured.read(tmp_path).last_step == WARM_UP + ENOUGH + 4
    assert len(told) == 1


def test_a_run_that_ends_in_the_warm_up_writes_nothing(tmp_path: Path) -> None:
    hook, measurements = hook_of(tmp_path, [])
    train(hook, measurements, WARM_UP - 1)
    hook.write()
    assert list(tmp_path.iterdir()) == []


def test_what_cannot_be_compared_is_said_and_fails_nothing(tmp_path: Path) -> None:
    told: list[Measured] = []
    hook, measurements = hook_of(tmp_path, told)
    train(hook, measurements, WARM_UP)
    hook.write()
    said: list[str] = []
    tell_comparison(Settings.model_validate({"run": {"max_steps": 1}}), told[0], said.append)  # no such model
    assert len(said) == 1
    assert said[0].startswith("measured: ")


@pytest.mark.gpu
def test_peaks_are_known_by_phase_on_a_gpu() -> None:
    engine = HoldingEngine()
    engine.device = torch.device("cuda")
    measurements = Measurements(engine, counting=False)  # type: ignore[arg-type]
    big = torch.zeros(1 << 24, device="cuda")
    measurements.after("forward")
    del big
    measurements.after("step")
    peaks = measurements.share()["peaks"]
    assert peaks["forward"] >= 1 << 26 > peaks["step"]
    assert measurements.memory_peak_bytes() == peaks["forward"], "the peak of the run stays known"
