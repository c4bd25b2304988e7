"""bf16 and fp16: near the plain autocast loop, with fp32 masters, and with one rule of loss scaling for all engines."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.engines import harness, problem
from tests.engines.harness import MemorySource
from tests.engines.problem import ALL_STEPS, OPTIMIZER, POISONED_STEP
from tests.ranks import run_ranks


def low_precision(rank: int, world: int, kind: str) -> bytes:
    # On CPUs without fp16 instructions DeepSpeed refuses fp16; torch computes it all the same, if slowly.
    from deepspeed.accelerator import get_accelerator

    get_accelerator().is_fp16_supported = lambda: True  # type: ignore[method-assign]

    start = problem.weights_of(problem.make_model())
    report: dict[str, Any] = {}
    engine = harness.build(kind, MemorySource.of_weights(start), precision="bf16")
    loaded = dict(engine.full_weights())
    report["masters are exact"] = all(loaded[name].equal(start[name]) for name in start)
    report["bf16"] = problem.train_with(engine, micro=2, poisoned_rank=0)
    report["bf16 weights"] = dict(engine.full_weights())
    ranges = list(engine.local_state())
    report["state is fp32"] = all(r.values.dtype == torch.float32 for r in ranges) and bool(ranges)
    engine.close()

    fp16 = {"mode": "fp16", "initial_loss_scale": 2.0**20, "loss_scale_window": 2}
    engine = harness.build(kind, MemorySource.of_weights(start), precision=fp16)
    losses, results = problem.train_with(engine, micro=2, steps=ALL_STEPS[:3], poisoned_rank=1)
    state, scalars = harness.whole_state(engine), engine.scalars()
    engine.load_state(state, scalars)
    more_losses, more_results = problem.train_with(engine, micro=2, steps=ALL_STEPS[3:])
    report["fp16"] = losses + more_losses, results + more_results
    report["fp16 weights"], report["fp16 scalars"] = dict(engine.full_weights()), (scalars, engine.scalars())
    engine.close()
    return harness.packed(report)


@pytest.fixture(scope="module")
def reports() -> dict[str, list[dict[str, Any]]]:
    return {kind: [harness.unpacked(r) for r in run_ranks(low_precision, 2, kind)] for kind in harness.EVERY_ENGINE}


@pytest.mark.parametrize("kind", harness.EVERY_ENGINE)
def test_bf16_is_as_near_to_fp32_as_the_plain_autocast_loop(kind: str, reports: dict[str, Any]) -> None:
    exact, autocast = problem.make_model(), problem.make_model()
    exact_losses, _ = problem.train_plainly(exact, OPTIMIZER)
    autocast_losses, _ = problem.train_plainly(autocast, OPTIMIZER, autocast=torch.bfloat16)
    found = reports[kind]
    losses = [sum(r["bf16"][0][step] for r in found) for step in ALL_STEPS]

    def distance(curve: list[float]) -> float:
        return max(map(problem.relative, curve, exact_losses))

    def weight_distance(weights: dict[str, torch.Tensor]) -> float:
        expected = problem.weights_of(exact)
        squares = sum(float((weights[n] - expected[n]).square().sum()) for n in expected)
        return math.sqrt(squares)

    moved = weight_distance(problem.weights_of(problem.make_model()))
    print(
        kind,
        "loss",
        distance(losses),
        "autocast",
        distance(autocast_losses),
        "weights",
        weight_distance(found[0]["bf16 weights"]),
        weight_distance(problem.weights_of(autocast)),
        moved,
    )
    assert distance(losses) < 2 * distance(autocast_losses)
    assert weight_distance(found[0]["bf16 weights"]) < 2 * weight_distance(problem.weights_of(autocast))
    assert weight_distance(found[0]["bf16 weights"]) < moved / 3  # it does not stand still
    for report in found:
        assert report["masters are exact"]
        assert report["state is fp32"]
        assert [r.applied for r in report["bf16"][1]] == [step != POISONED_STEP for step in ALL_STEPS]


def test_fp16_scales_losses_alike_in_every_engine(reports: dict[str, Any]) -> None:
    """The scale halves after a step that was not finite and doubles after two good ones in a row."""
    histories = {kind: [(r.applied, r.loss_scale) for r in found[0]["fp16"][1]] for kind, found in reports.items()}
    assert len({tuple(history) for history in histories.values()}) == 1, histories
    history = histories["ddp"]
    assert not history[POISONED_STEP][0]
    assert any(applied for applied, _ in history)
    scale, good = 2.0**20, 0
    for applied, used in history:
        assert used == scale
        good = good + 1 if applied else 0
        scale = scale * 2 if good == 2 else scale if applied else scale / 2
        good %= 2
    for found in reports.values():
        assert found[0]["fp16 scalars"] == found[1]["fp16 scalars"] == reports["ddp"][0]["fp16 scalars"]
        assert found[0]["fp16 scalars"][1]["loss_scale"] == scale
        losses = [sum(r["fp16"][0][step] for r in found) for step in ALL_STEPS]
        expected = [sum(r["fp16"][0][step] for r in reports["ddp"]) for step in ALL_STEPS]
        assert max(map(problem.relative, losses, expected)) < 1e-3
