"""Parameters that have done fewer optimizer steps than others keep their count and their bias correction."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qwen_edit_zero.engines.step_counts import StepCounts
from qwen_edit_zero.errors import CheckpointError
from tests.engines import harness, problem
from tests.engines.harness import MemorySource
from tests.engines.uneven import BEHIND, DONE, SCALARS, state
from tests.ranks import run_ranks

STEPS = range(DONE, DONE + 3)


def train_plainly() -> dict[str, Any]:
    """`torch.optim.AdamW` itself, with these counts."""
    model, begun = problem.make_model(), state()
    options = problem.OPTIMIZER
    adamw = torch.optim.AdamW(
        model.parameters(), lr=options.lr, betas=options.betas, eps=options.eps, weight_decay=options.weight_decay
    )
    for name, parameter in model.named_parameters():
        adamw.state[parameter] = {
            "step": torch.tensor(float(BEHIND.get(name, DONE))),
            "exp_avg": begun["exp_avg"][name].clone(),
            "exp_avg_sq": begun["exp_avg_sq"][name].clone(),
        }
    losses, _ = problem.train_plainly(model, options, steps=STEPS, adamw=adamw)
    return {"losses": losses, "weights": problem.weights_of(model)}


def train(rank: int, world: int, kind: str) -> bytes:
    begun = MemorySource(state())
    source = MemorySource.of_weights(problem.weights_of(problem.make_model()))
    options = {"cpu_offload": True} if kind == "fsdp2-cpu-offload" else {}
    engine = harness.build(kind, source, **options)
    reports = []
    for scalars in ({"optimizer_steps": 7}, SCALARS, SCALARS):  # loaded over other counts, too
        engine.load_state(begun, scalars)
        held = engine.scalars()
        losses, _ = problem.train_with(engine, micro=2, steps=STEPS)
        report = {"held": held, "losses": losses, "weights": dict(engine.full_weights()), "later": engine.scalars()}
        reports.append(report)
    engine.close()
    return harness.packed(reports)


@pytest.mark.parametrize(
    "kind", [*harness.EVERY_ENGINE, pytest.param("zero2-offload", marks=pytest.mark.slow), "fsdp2-cpu-offload"]
)
def test_every_engine_steps_as_adamw_does_with_these_counts(kind: str) -> None:
    expected = train_plainly()
    by_rank = [harness.unpacked(r) for r in run_ranks(train, 2, kind)]
    for number in (1, 2):
        reports = [reports[number] for reports in by_rank]
        losses = [sum(step) for step in zip(*(r["losses"] for r in reports), strict=True)]
        assert max(map(problem.relative, losses, expected["losses"])) < 1e-5
        for report in reports:
            assert report["held"] == SCALARS
            later = {name: count + len(STEPS) for name, count in BEHIND.items()}
            assert report["later"] == {"optimizer_steps": DONE + len(STEPS), "parameter_steps": later}
            assert problem.largest_deviation(report["weights"], expected["weights"]) < 1e-5
    other = by_rank[0][0]  # with one count for all it is another training
    assert other["later"] == {"optimizer_steps": 10}
    assert problem.largest_deviation(other["weights"], expected["weights"]) > 1e-3


@pytest.mark.parametrize(
    ("scalars", "words"),
    [
        ({}, "no 'optimizer_steps'"),
        ({"optimizer_steps": 3, "parameter_steps": {"a": 4}}, "4 steps on 'a', of 3 in all: that cannot be"),
        ({"optimizer_steps": 3, "parameter_steps": {"a": -1}}, "that cannot be"),
        ({"optimizer_steps": 3, "parameter_steps": {"b": 1}}, "'b', of 3 in all: this run does not train it"),
    ],
)
def test_counts_that_cannot_be_are_refused(scalars: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        StepCounts.of_scalars(scalars, {"a"})
