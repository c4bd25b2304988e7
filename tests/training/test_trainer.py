"""The loop against a scripted engine: what it divides by, what it reports, when it gives up."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qwen_edit_zero.edit_data.batches.batch import EditBatch
from qwen_edit_zero.edit_data.batches.loader import StepBatches
from qwen_edit_zero.edit_data.batches.schedule import StepPlan
from qwen_edit_zero.engines.base import StepResult
from qwen_edit_zero.engines.ranks import Ranks
from qwen_edit_zero.errors import DivergenceError
from qwen_edit_zero.training.metrics import StepMetrics
from qwen_edit_zero.training.trainer import Trainer


class ScriptedEngine:
    """Remembers what it was told; each step's gradient norm comes from a script."""

    device = torch.device("cpu")
    ranks = Ranks(0, 1)

    def __init__(self, norms: list[float], *, steps: int = 0, loss_scale: float = 1.0) -> None:
        self.norms, self.backwards, self.lasts, self.lrs = norms, [], [], []
        self.steps, self.loss_scale = steps, loss_scale

    def scalars(self) -> dict[str, int]:
        return {"optimizer_steps": self.steps}

    def forward(self, **inputs: Any) -> None: ...

    @contextmanager
    def micro_step(self, *, is_last: bool) -> Iterator[None]:
        self.lasts.append(is_last)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        self.backwards.append(float(loss))

    def step(self, *, lr: float) -> StepResult:
        self.lrs.append(lr)
        norm = self.norms[len(self.lrs) - 1]
        applied = math.isfinite(norm)
        self.steps += applied
        names = () if applied else ("blocks.3.weight",)
        return StepResult(grad_norm=norm, applied=applied, loss_scale=self.loss_scale, non_finite=names)


class ConstantTask:
    """Sample `n` has loss n."""

    def losses(self, forward: Any, batch: EditBatch) -> torch.Tensor:
        return torch.tensor([float(i) for i in batch.sample_ids])

    def flops(self, batch: EditBatch) -> float:
        return 1e9


def batch(ids: tuple[int, ...], weights: tuple[float, ...]) -> EditBatch:
    latents = torch.zeros(len(ids), 16, 2, 2)
    return EditBatch(
        latents, (latents,), torch.zeros(len(ids), 1, 1), None, torch.tensor(weights), tuple(map(str, ids)), 0
    )


def trainer(engine: ScriptedEngine, micro: list[EditBatch], plan_size: int, hooks: list[Any], **more: Any) -> Trainer:
    def steps(first: int, last: int) -> Iterator[tuple[StepPlan, StepBatches]]:
        for step in range(first, last):
            left = iter(micro)
            yield StepPlan(step, 0, tuple(range(plan_size))), StepBatches(len(micro), lambda left=left: next(left))

    return Trainer(
        engine,  # type: ignore[arg-type]
        ConstantTask(),
        steps=steps,
        lr_at=lambda step: 10.0 + step,
        sample_ids=lambda plan: [f"sample-{i}" for i in plan.indices],
        max_skipped=more.get("max_skipped", 2),
        min_loss_scale=more.get("min_loss_scale"),
        hooks=hooks,
    )


def test_losses_are_summed_and_divided_once_by_the_real_samples_of_the_global_batch() -> None:
    engine, seen = ScriptedEngine([1.0]), list[StepMetrics]()
    hook = SimpleNamespace(after_step=lambda m, is_last: seen.append(m))
    micro = [batch((1, 2), (1.0, 1.0)), batch((6,), (1.0,)), batch((100,), (0.0,))]  # the last is a filler
    trainer(engine, micro, plan_size=3, hooks=[hook]).fit(0, 1, samples_seen=40)
    assert engine.backwards == pytest.approx([1.0, 2.0, 0.0])
    assert engine.lasts == [False, False, True]
    assert (seen[0].loss, seen[0].samples_seen, seen[0].step) == (3.0, 43, 1)


def test_the_learning_rate_follows_the_step_also_when_a_run_goes_on() -> None:
    engine = ScriptedEngine([1.0] * 3, steps=5)
    trainer(engine, [batch((1,), (1.0,))], plan_size=1, hooks=[]).fit(5, 8, samples_seen=0)
    assert engine.lrs == [15.0, 16.0, 17.0]


def test_a_skipped_step_does_not_move_the_schedule_of_the_learning_rate() -> None:
    engine = ScriptedEngine([1.0, math.nan, 1.0])
    trainer(engine, [batch((1,), (1.0,))], plan_size=1, hooks=[]).fit(0, 3, samples_seen=0)
    assert engine.lrs == [10.0, 11.0, 11.0]


def test_what_was_not_finite_is_recorded_with_the_step() -> None:
    seen = list[StepMetrics]()
    hook = SimpleNamespace(after_step=lambda m, is_last: seen.append(m))
    good = [batch((1, 2), (1.0, 1.0))]
    with pytest.raises(DivergenceError, match="none of the steps 1 to 1 was applied"):
        trainer(ScriptedEngine([math.nan]), good, plan_size=2, hooks=[hook]).fit(0, 1, samples_seen=0)
    assert seen[0].skip_reason == "the gradient of blocks.3.weight is not finite, though the losses are"
    bad = [batch(("inf", 2), (1.0, 1.0))]  # type: ignore[arg-type]
    trainer(ScriptedEngine([math.nan, 1.0]), bad, plan_size=2, hooks=[hook]).fit(0, 2, samples_seen=0)
    assert seen[1].skip_reason == (
        "the loss of sample 'inf' (rank 0) is not finite, nor is the gradient of blocks.3.weight"
    )


def test_a_gradient_that_is_not_finite_at_the_smallest_loss_scale_ends_the_run() -> None:
    steps = [batch((1,), (1.0,))]
    skipping = trainer(ScriptedEngine([math.nan, 1.0], loss_scale=4.0), steps, 1, [], min_loss_scale=2.0)
    skipping.fit(0, 2, samples_seen=0)  # the scale can still fall
    ending = trainer(ScriptedEngine([math.nan], loss_scale=2.0), steps, 1, [], min_loss_scale=2.0)
    with pytest.raises(DivergenceError, match=r"min_loss_scale 2, .*step 1 .*gradient of blocks\.3\.weight"):
        ending.fit(0, 1, samples_seen=0)


def test_skipped_steps_are_tolerated_up_to_the_setting_and_then_named() -> None:
    steps, nan = [batch((1,), (1.0,))], math.nan
    trainer(ScriptedEngine([nan, nan, 1.0, nan, nan]), steps, plan_size=1, hooks=[]).fit(0, 5, samples_seen=0)
    with pytest.raises(DivergenceError, match=r"3 consecutive steps.*step 4 with samples sample-0.*those of step 1"):
        trainer(ScriptedEngine([1.0, nan, nan, nan]), steps, plan_size=1, hooks=[]).fit(0, 4, samples_seen=0)


def test_hooks_learn_which_step_is_the_last() -> None:
    lasts = list[bool]()
    hook = SimpleNamespace(after_step=lambda m, is_last: lasts.append(is_last))
    trainer(ScriptedEngine([1.0] * 3), [batch((1,), (1.0,))], plan_size=1, hooks=[hook]).fit(1, 4, samples_seen=0)
    assert lasts == [False, False, True]
