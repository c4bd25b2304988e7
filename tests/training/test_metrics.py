"""metrics.jsonl: one strict JSON line a step, also after a crash and a resume."""

import json
import math
from pathlib import Path

from qwen_edit_zero.training.metrics import MetricsWriter, StepMetrics


def metrics(step: int, loss: float = 0.5) -> StepMetrics:
    return StepMetrics(
        step=step, epoch=0, samples_seen=8 * step, loss=loss, grad_norm=1.0, lr=1e-4, step_seconds=0.1,
        samples_per_second=80.0, data_seconds=0.0, imbalance=0.0, tflops_per_device=0.1, memory_peak_bytes=1,
    )  # fmt: skip


def steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_resumed_run_has_each_step_once(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, first_step=0, tensorboard=False)
    for step in range(1, 8):
        writer.write(metrics(step))
    writer.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 8, "loss": 0.')  # the process died here; its last checkpoint was step 5
    writer = MetricsWriter(tmp_path, first_step=5, tensorboard=False)
    writer.write(metrics(6))
    writer.close()
    assert steps(tmp_path) == [1, 2, 3, 4, 5, 6]


def test_what_epochs_drew_is_kept_as_far_as_the_run_that_goes_on_had_come(tmp_path: Path) -> None:
    for first, epochs in ((0, (0, 1, 2)), (9, (2,))):  # the first run died after its checkpoint of step 9
        writer = MetricsWriter(tmp_path, first_step=first, tensorboard=False)
        for epoch in epochs:
            writer.write_drawn({"添加文字": 30 + epoch, "": 10}, epoch=epoch, step=4 * (epoch + 1))
        writer.close()
    lines = [json.loads(line) for line in (tmp_path / "drawn.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [(line["epoch"], line["step"], line["samples"]) for line in lines] == [(0, 4, 40), (1, 8, 41), (2, 12, 42)]
    assert lines[1]["drawn"] == {"添加文字": 31, "": 10}


def test_what_is_not_finite_is_null_so_that_every_reader_can_parse_the_line(tmp_path: Path) -> None:
    writer = MetricsWriter(tmp_path, first_step=0, tensorboard=False)
    writer.write(metrics(1, loss=math.nan))
    writer.close()
    line = (tmp_path / "metrics.jsonl").read_text()
    assert json.loads(line, parse_constant=lambda name: 1 / 0)["loss"] is None


def test_tensorboard_gets_the_same_numbers(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    writer = MetricsWriter(tmp_path, first_step=0, tensorboard=True)
    for step in (1, 2):
        writer.write(metrics(step, loss=step / 4))
    writer.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/loss")] == [(1, 0.25), (2, 0.5)]
