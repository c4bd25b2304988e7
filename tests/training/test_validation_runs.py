"""The loss on held-out samples in runs: the same under every engine and number of ranks, and without a trace."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from qwen_edit_zero.checkpoints.manifest import load_head
from tests.training.started import events, lines_of, log, train

FSDP2 = ["--engine", "fsdp2"]
HELD_OUT = ["validation.every=2", "validation.samples=4", "validation.sigmas=4", "optimizer.ema=0.5"]


def arguments(recipe: str, *more: str) -> list[str]:
    # 6 samples a step divide over one, two and three ranks; no pictures, so that only the loss asks for held-out rows
    return [recipe, "batch.global_size=6", "sampling.count=0", "run.max_steps=4", *more]


def held_out(run: Path) -> dict[int, dict[str, Any]]:
    """What the run has recorded, by step; the last of a step."""
    return {line["step"]: line for line in lines_of(run / "metrics.jsonl") if "held_out_loss" in line}


def losses(run: Path) -> list[tuple[float, float]]:
    return [(m["loss"], m["grad_norm"]) for m in lines_of(run / "metrics.jsonl") if "loss" in m]


@pytest.fixture(scope="module")
def reference(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four steps under FSDP2 on two ranks."""
    run = tmp_path_factory.mktemp("reference") / "run"
    assert train(2, run, arguments(recipe, *FSDP2, *HELD_OUT)) == [0, 0]
    return run


@pytest.fixture
def half(reference: Path, tmp_path: Path) -> Path:
    """The same run as if it had died after step 4, before its checkpoint."""
    shutil.copytree(reference, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    return tmp_path / "run"


def test_values_are_recorded_told_and_kept_with_checkpoints(reference: Path) -> None:
    found = held_out(reference)
    assert list(found) == [0, 2, 4]
    for record in found.values():
        assert record["held_out_samples"] == 4
        assert list(record["held_out_by_sigma"]) == ["0-0.25", "0.25-0.5", "0.5-0.75", "0.75-1"]
        # each quarter has as many levels
        assert sum(record["held_out_by_sigma"].values()) / 4 == pytest.approx(record["held_out_loss"], rel=1e-9)
    assert found[4]["held_out_loss"] < found[0]["held_out_loss"], "the tiny model learns in four steps"
    told = [e for e in events(reference) if e["event"] == "validation"]
    assert [(e["step"], e["loss"]) for e in told] == [(s, r["held_out_loss"]) for s, r in found.items()]
    best = min(found, key=lambda step: found[step]["held_out_loss"])
    assert told[-1]["best_step"] == best
    text = log(reference, 0)
    assert "held-out loss: 4 of " in text
    assert "held-out samples at 4 noise levels each, before the first step, every 2 steps and at the end" in text
    assert f"step 0: held-out loss {found[0]['held_out_loss']:.4f}; by noise level 0-0.25: " in text
    assert f"step 4: held-out loss {found[4]['held_out_loss']:.4f} (the best so far); by" in text
    for step in (2, 4):
        checkpoint = load_head(reference / "checkpoints" / f"step-{step:08d}")
        assert checkpoint.metrics["validation"] == found[step]["held_out_loss"]


def test_training_is_the_same_to_the_bit_without_it(reference: Path, recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert train(2, run, arguments(recipe, *FSDP2, "optimizer.ema=0.5")) == [0, 0]
    assert losses(run) == losses(reference)
    assert held_out(run) == {}


@pytest.mark.parametrize(
    ("world", "engine", "micro_size"),
    [
        (1, ["--engine", "ddp"], 3),
        (2, ["--ds", "ds_configs/zero2.json", "engine.sequence_parallel=2"], 3),
        (3, ["--ds", "ds_configs/zero3.json"], 1),  # 16 forwards: in the last round two ranks repeat one
    ],
)
def test_it_depends_on_no_engine_ranks_or_micro_batch(
    world: int, engine: list[str], micro_size: int, reference: Path, recipe: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    given = arguments(recipe, *engine, *HELD_OUT, f"batch.micro_size={micro_size}", "run.max_steps=1")
    assert train(world, run, given) == [0] * world
    expected, found = held_out(reference)[0], held_out(run)[0]
    assert found["held_out_set"] == expected["held_out_set"]
    assert found["held_out_loss"] == pytest.approx(expected["held_out_loss"], rel=1e-6)
    for part in ("held_out_by_sigma", "held_out_by_category"):
        assert found[part] == pytest.approx(expected[part], rel=1e-6)
    assert list(held_out(run)) == [0, 1], "the last step has a value"


def test_a_run_that_goes_on_repeats_no_value_and_knows_its_best(reference: Path, half: Path, recipe: str) -> None:
    before = len(lines_of(half / "metrics.jsonl"))
    assert train(1, half, arguments(recipe, "--engine", "ddp", *HELD_OUT, "batch.micro_size=3")) == [0]
    assert len(lines_of(half / "metrics.jsonl")) == before
    for step, record in held_out(reference).items():
        assert held_out(half)[step]["held_out_loss"] == pytest.approx(record["held_out_loss"], rel=1e-5)
    last = [e for e in events(half) if e["event"] == "validation"][-1]
    assert (last["step"], last["best_step"]) == (4, 4)
    assert log(half, 0).count(": held-out loss ") == 1, "the second start computes no first value"


def test_other_samples_begin_anew_with_a_value_at_once(reference: Path, half: Path, recipe: str) -> None:
    ema = ["validation.every=4", "validation.samples=4", "validation.weights=ema", "optimizer.ema=0.5"]
    given = arguments(recipe, "--engine", "ddp", *ema, "batch.micro_size=3", "run.max_steps=3")
    assert train(1, half, given) == [0]
    before, found = held_out(reference), held_out(half)
    assert list(found) == [0, 2, 3]
    assert found[0]["held_out_set"] != found[2]["held_out_set"] == found[3]["held_out_set"]
    assert before[2]["held_out_loss"] < found[2]["held_out_loss"] < before[0]["held_out_loss"], "the average lags"
    assert "earlier values do not compare, and the best begins anew" in log(half, 0)
    assert "at 4 noise levels each, with averaged weights" in log(half, 0)
