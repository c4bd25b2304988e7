"""The training loop. It knows the engine interface and nothing of which engine, model or file system is behind it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from qwen_edit_zero.cluster.collectives import sum_over_ranks
from qwen_edit_zero.edit_data.batch import EditBatch
from qwen_edit_zero.edit_data.loader import StepBatches
from qwen_edit_zero.edit_data.schedule import StepPlan
from qwen_edit_zero.engines.base import ParallelEngine
from qwen_edit_zero.errors import DivergenceError
from qwen_edit_zero.training.metrics import StepMetrics, memory_peak_bytes


class Task(Protocol):
    """Turns a micro-batch into losses; see `training/task.py`."""

    def losses(self, forward: Callable[..., Any], batch: EditBatch) -> torch.Tensor:
        """Per-sample losses (B,) in fp32, before the samples' own weights."""
        ...

    def flops(self, batch: EditBatch) -> float:
        """Model FLOP of training on this micro-batch's real samples."""
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
        lr_at: learning rate of a 0-based step.
        sample_ids: ids of a step's samples over all ranks, for messages.
        max_skipped: consecutive steps with a non-finite gradient that are tolerated.
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
        hooks: Sequence[Hook],
    ) -> None:
        self.engine, self.task, self.hooks = engine, task, hooks
        self.steps, self.lr_at, self.sample_ids = steps, lr_at, sample_ids
        self.max_skipped = max_skipped

    def fit(self, first: int, last: int, *, samples_seen: int) -> None:
        """Train steps `first` up to `last`, having seen `samples_seen` samples before. Raises DivergenceError."""
        skipped_in_a_row = 0
        for plan, batches in self.steps(first, last):
            metrics = self.train_step(plan, batches, samples_seen=samples_seen)
            samples_seen = metrics.samples_seen
            skipped_in_a_row = skipped_in_a_row + 1 if metrics.skipped else 0
            for hook in self.hooks:
                hook.after_step(metrics, is_last=metrics.step == last)
            if skipped_in_a_row > self.max_skipped:
                raise DivergenceError(
                    f"the gradient was not finite in {skipped_in_a_row} consecutive steps, the last of them step "
                    f"{metrics.step} with samples {', '.join(self.sample_ids(plan))}; the weights are those of step "
                    f"{metrics.step - skipped_in_a_row}. Lower optimizer.lr, look at these samples, or use "
                    "precision=bf16; optimizer.max_skipped sets how many skipped steps are tolerated"
                )

    def train_step(self, plan: StepPlan, batches: StepBatches, *, samples_seen: int) -> StepMetrics:
        """One optimizer step over all ranks. The loss reported is the mean over the samples of the global batch."""
        began = time.perf_counter()
        samples, data_seconds, flops = len(plan.indices), 0.0, 0.0
        loss_sum = torch.zeros((), dtype=torch.float64, device=self.engine.device)  # read once a step: no sync between
        incoming = iter(batches)
        for i in range(len(batches)):
            waiting = time.perf_counter()
            batch = next(incoming).to(self.engine.device, non_blocking=True)
            data_seconds += time.perf_counter() - waiting
            with self.engine.micro_step(is_last=i == len(batches) - 1):
                loss = (self.task.losses(self.engine.forward, batch) * batch.weights).sum()
                self.engine.backward(loss / samples)
            loss_sum += loss.detach()
            flops += self.task.flops(batch)
        lr = self.lr_at(plan.step)
        result = self.engine.step(lr=lr)
        totals = torch.tensor([loss_sum.item(), flops], dtype=torch.float64)
        total_loss, total_flops = sum_over_ranks(totals, self.engine.device).tolist()
        seconds = time.perf_counter() - began
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
            tflops_per_device=total_flops / self.engine.dp_size / seconds / 1e12,
            memory_peak_bytes=memory_peak_bytes(self.engine.device),
            skipped=not result.applied,
            loss_scale=result.loss_scale,
        )
