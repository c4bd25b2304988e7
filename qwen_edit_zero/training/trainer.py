"""The training loop. It knows the engine interface and nothing of which engine, model or file system is behind it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import torch

from qwen_edit_zero.cluster.collectives import gather_objects, sum_over_ranks
from qwen_edit_zero.cluster.pulse import position
from qwen_edit_zero.edit_data.batches.batch import EditBatch
from qwen_edit_zero.edit_data.batches.loader import StepBatches
from qwen_edit_zero.edit_data.batches.schedule import StepPlan
from qwen_edit_zero.engines.base import ParallelEngine
from qwen_edit_zero.engines.ranks import Ranks
from qwen_edit_zero.errors import DivergenceError
from qwen_edit_zero.training.guard import SpikeGuard
from qwen_edit_zero.training.measured import BETWEEN, Measurements
from qwen_edit_zero.training.metrics import StepMetrics
from qwen_edit_zero.training.stragglers import LastStep


class Task(Protocol):
    """Turns a micro-batch into losses; see `training/task.py`."""

    def losses(self, forward: Callable[..., Any], batch: EditBatch) -> torch.Tensor:
        """Per-sample losses (B,) in fp32, before the samples' own weights."""
        ...

    def flops(self, batch: EditBatch) -> float:
        """Model FLOP of training on this micro-batch's real samples; must not wait for the device."""
        ...


class Hook(Protocol):
    """Something that happens after optimizer steps, on every rank."""

    def after_step(self, metrics: StepMetrics, *, is_last: bool) -> None:
        """Called after each optimizer step, in the same order on every rank."""
        ...


class Trainer:
    """Takes optimizer steps from a loader and tells the hooks about each.

    Args:
        steps: gives steps `first` up to `last`, each with this rank's micro-batches (`BatchLoader.steps`).
        lr_at: learning rate after so many applied optimizer steps; a skipped step does not move the schedule.
        sample_ids: ids of a step's samples over all ranks, for messages.
        max_skipped: consecutive steps with a non-finite gradient that are tolerated.
        min_loss_scale: of fp16, at which a skipped step ends the run; None in other precisions.
        asked_to_end: whether this rank has been asked to end the run after the step under way. All ranks learn of it
            with the step's loss, in a collective that there is anyway, so that it costs nothing, and is the same step
            for all.
        guard: judges each step before it is applied. The loss of all ranks is then known before the optimizer's step,
            not after it, as without a guard.
        last: is told this rank's own share of each step.
        measurements: is told where each step is.
        hooks: called after each step, in this order.
        can_wait: those of the hooks that are left out after the step with which the run ends early, since whoever
            asked for the end may not wait for long: what must not be lost is saved first.
    """

    def __init__(
        self,
        engine: ParallelEngine,
        task: Task,
        *,
        steps: Callable[[int, int], Iterator[tuple[StepPlan, StepBatches]]],
        lr_at: Callable[[int], float],
        sample_ids: Callable[[StepPlan], Sequence[str]],
        max_skipped: int,
        min_loss_scale: float | None = None,
        asked_to_end: Callable[[], bool] = lambda: False,
        guard: SpikeGuard | None = None,
        last: LastStep | None = None,
        measurements: Measurements | None = None,
        hooks: Sequence[Hook],
        can_wait: Collection[Hook] = (),
    ) -> None:
        self.engine, self.task, self.hooks, self.can_wait = engine, task, hooks, can_wait
        self.steps, self.lr_at, self.sample_ids = steps, lr_at, sample_ids
        self.max_skipped, self.min_loss_scale = max_skipped, min_loss_scale
        self.asked_to_end, self._ends = asked_to_end, False
        self.guard = guard if guard is not None and guard.on else None
        self.last = LastStep() if last is None else last
        self.measurements = Measurements(engine, counting=False) if measurements is None else measurements
        engine.veto = None if self.guard is None else self.guard.veto

    def fit(self, first: int, last: int, *, samples_seen: int) -> StepMetrics | None:
        """Train steps `first` up to `last`, having seen `samples_seen` samples before.

        Returns None when the last step is done; else the step, the same on all ranks, after which the run is to end
        because some rank was asked to. Raises DivergenceError, and RollBack for the guard.
        """
        skipped_in_a_row = 0
        for plan, batches in self.steps(first, last):
            if self.guard is not None and plan.step + 1 in self.guard.left_out:
                metrics = self._left_out(plan, batches, samples_seen=samples_seen)
            else:
                metrics = self.train_step(plan, batches, samples_seen=samples_seen)
            samples_seen = metrics.samples_seen
            skipped_in_a_row = skipped_in_a_row + 1 if metrics.skipped and not metrics.guarded else 0
            ends_early = self._ends and metrics.step < last
            for hook in self.hooks:
                if not (ends_early and hook in self.can_wait):
                    hook.after_step(metrics, is_last=metrics.step == last)
            if skipped_in_a_row:
                self._check_skipping(metrics, plan, skipped_in_a_row)
            if ends_early:
                return metrics
        if skipped_in_a_row and skipped_in_a_row == last - first:
            raise DivergenceError(
                f"none of the steps {first + 1} to {last} was applied: {metrics.skip_reason}. The weights are as the "
                "run found them"
            )
        return None

    def _check_skipping(self, metrics: StepMetrics, plan: StepPlan, in_a_row: int) -> None:
        """Raise DivergenceError if a skipped step is one too many."""
        where = (
            f"the last of them step {metrics.step} with samples {', '.join(self.sample_ids(plan))}: "
            f"{metrics.skip_reason}; the weights are those of step {metrics.step - in_a_row}"
        )
        if self.min_loss_scale is not None and metrics.loss_scale <= self.min_loss_scale:
            raise DivergenceError(
                f"the gradient is not finite even at the smallest loss scale, precision.min_loss_scale "
                f"{self.min_loss_scale:g}, after {in_a_row} consecutive skipped steps, {where}. fp16 ends at 65504: "
                "use precision=bf16, or lower optimizer.lr if the loss grew before"
            )
        if in_a_row > self.max_skipped:
            raise DivergenceError(
                f"the gradient was not finite in {in_a_row} consecutive steps, {where}. Lower optimizer.lr, look at "
                "these samples, or use precision=bf16; optimizer.max_skipped sets how many skipped steps are tolerated"
            )

    def train_step(self, plan: StepPlan, batches: StepBatches, *, samples_seen: int) -> StepMetrics:
        """One optimizer step over all ranks. The loss reported is the mean over the samples of the global batch."""
        began = time.perf_counter()
        position.begin(plan.step + 1)
        self.measurements.after(BETWEEN)
        samples, data_seconds, flops = len(plan.indices), 0.0, 0.0
        by_sample: list[tuple[Sequence[str], torch.Tensor]] = []
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.engine.device)  # read once a step: no sync between
        incoming = iter(batches)
        for i in range(len(batches)):
            waiting = time.perf_counter()
            position.at(f"waiting for the data of micro-batch {i + 1} of {len(batches)}")
            batch = next(incoming).to(self.engine.device, non_blocking=True)  # the loader has had it moved already
            data_seconds += time.perf_counter() - waiting
            flops += self.task.flops(batch)
            position.at(f"forward and backward of micro-batch {i + 1} of {len(batches)}", batch.sample_ids)
            with self.engine.micro_step(is_last=i == len(batches) - 1):
                losses = self.task.losses(self.engine.forward, batch)
                loss = (losses * batch.weights).sum()
                self.measurements.after_forward(batch)
                self.engine.backward(loss / samples)
            self.measurements.after_backward(is_last=i == len(batches) - 1)
            loss_sum += loss.detach()
            by_sample.append((batch.sample_ids, losses.detach()))
        lr = self.lr_at(int(self.engine.scalars()["optimizer_steps"]))
        result = None
        if self.guard is None:
            position.at("the optimizer's step")
            result = self.engine.step(lr=lr)
        totals = torch.tensor([loss_sum.item(), flops, float(self.asked_to_end())], dtype=torch.float64)
        position.at("summing losses over ranks")
        waiting = time.perf_counter()
        # Ranks that split sequences have each computed the same samples' losses.
        sums = sum_over_ranks(totals, self.engine.device) / self.engine.ranks.sequence_size
        total_loss, total_flops, asked = sums.tolist()
        self.last.data_seconds, self.last.batch = data_seconds, batch
        self.last.wait_seconds = time.perf_counter() - waiting
        self._ends = asked > 0
        if result is None:
            assert self.guard is not None
            self.guard.expect(total_loss / samples)
            position.at("the optimizer's step")
            result = self.engine.step(lr=lr)
        self.measurements.after_step()
        position.end("between steps")
        seconds = time.perf_counter() - began
        reason: str | None = None
        if result.vetoed and self.guard is not None:
            reason = self.guard.act(plan.step + 1, self.sample_ids(plan))
        elif not result.applied:
            reason = _skip_reason(by_sample, result.non_finite, self.engine.ranks)
        return StepMetrics(
            step=plan.step + 1,
            epoch=plan.epoch,
            samples_seen=samples_seen + samples,
            loss=total_loss / samples,
            grad_norm=result.grad_norm,
            lr=lr,
            step_seconds=seconds,
            samples_per_second=samples / seconds,
            data_seconds=data_seconds,
            imbalance=batches.imbalance,
            tflops_per_device=total_flops / self.engine.ranks.world_size / seconds / 1e12,
            memory_peak_bytes=self.measurements.memory_peak_bytes(),
            skipped=not result.applied,
            loss_scale=result.loss_scale,
            skip_reason=reason,
            guarded=result.vetoed,
        )

    def _left_out(self, plan: StepPlan, batches: StepBatches, *, samples_seen: int) -> StepMetrics:
        """A step that the guard has forbidden: its samples are passed over, and nothing changes."""
        began = time.perf_counter()
        for _ in batches:
            pass
        seconds = time.perf_counter() - began
        return StepMetrics(
            step=plan.step + 1,
            epoch=plan.epoch,
            samples_seen=samples_seen + len(plan.indices),
            loss=math.nan,
            grad_norm=math.nan,
            lr=self.lr_at(int(self.engine.scalars()["optimizer_steps"])),
            step_seconds=seconds,
            samples_per_second=0.0,
            data_seconds=seconds,
            imbalance=batches.imbalance,
            tflops_per_device=0.0,
            memory_peak_bytes=self.measurements.memory_peak_bytes(),
            skipped=True,
            skip_reason="its samples are left out, since the loss spiked after them",
            guarded=True,
        )


def _skip_reason(
    by_sample: Sequence[tuple[Sequence[str], torch.Tensor]], parameters: Sequence[str], ranks: Ranks
) -> str:
    """What was not finite in a step, over all ranks. Collective."""
    mine = [
        name
        for names, losses in by_sample
        for name, bad in zip(names, (~losses.isfinite()).tolist(), strict=True)
        if bad and ranks.sequence_rank == 0
    ]
    bad_losses = [
        f"'{name}' (rank {rank})" for rank, names in enumerate(gather_objects(mine)) for name in dict.fromkeys(names)
    ]
    gradients = f"the gradient of {', '.join(parameters) or 'no single parameter'}"
    if not bad_losses:
        return f"{gradients} is not finite, though the losses are"
    more = f" and {len(bad_losses) - 8} more" if len(bad_losses) > 8 else ""
    return f"the loss of sample {', '.join(bad_losses[:8])}{more} is not finite, nor is {gradients}"
