"""What happens after optimizer steps: metrics, checkpoints, sample pictures. Each is called on every rank."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from qwen_edit_zero.cluster import failure
from qwen_edit_zero.cluster.watchdog import Watchdog
from qwen_edit_zero.edit_data.batches.distribution import Distribution
from qwen_edit_zero.training.chronicle import Chronicle
from qwen_edit_zero.training.metrics import MetricsWriter, StepMetrics
from qwen_edit_zero.training.progress import Progress


class ChronicleHook:
    """The first of the hooks: where another start has taken over the run, nothing of a step is written.

    Once a step is done, kernels are compiled, and a rank without a sign of life for `silent_seconds` ends the job.
    """

    def __init__(self, chronicle: Chronicle, watchdog: Watchdog, silent_seconds: float) -> None:
        self._chronicle, self._watchdog, self._silent_seconds = chronicle, watchdog, silent_seconds

    def after_step(self, metrics: StepMetrics, *, is_last: bool) -> None:
        """Raise FencedError if the folder belongs to another start now; record a step that was skipped."""
        failure.expect_signs_within(self._silent_seconds)
        self._watchdog.stepped(metrics.step_seconds)
        self._chronicle.may_write_often()
        if metrics.skipped:
            self._chronicle.event("skipped", step=metrics.step, reason=metrics.skip_reason)


class MetricsHook:
    """Rank 0's live line and metrics files."""

    def __init__(self, progress: Progress, writer: MetricsWriter | None) -> None:
        self._progress, self._writer = progress, writer

    def after_step(self, metrics: StepMetrics, *, is_last: bool) -> None:
        """Write the step's line (rank 0) and move the bar on."""
        if self._writer is not None:
            self._writer.write(metrics)
        text = (
            f"loss {metrics.loss:.4f}  lr {metrics.lr:.2e}  grad {metrics.grad_norm:.3f}  "
            f"{metrics.samples_per_second:.2f} samples/s"
        )
        if metrics.skipped:
            self._progress.say(f"step {metrics.step} skipped: {metrics.skip_reason}")
        self._progress.advance(1, text)


class DrawnHook:
    """Says after each epoch how many samples of each category it drew, where they do not simply come once each."""

    def __init__(self, distribution: Distribution, progress: Progress, writer: MetricsWriter | None) -> None:
        self._distribution, self._progress, self._writer = distribution, progress, writer

    def after_step(self, metrics: StepMetrics, *, is_last: bool) -> None:
        """Record the epoch (rank 0) if the step was its last."""
        if self._writer is None or not self._distribution.ends_epoch(metrics.step, metrics.epoch):
            return
        drawn = self._distribution.drawn(metrics.epoch)
        self._writer.write_drawn(drawn, epoch=metrics.epoch, step=metrics.step)
        if self._distribution.repeated:
            self._progress.say(self._distribution.line(metrics.epoch))


class PeriodicHook:
    """Calls `action(metrics)` every `every` optimizer steps and after the last one."""

    def __init__(
        self, every: int | None, action: Callable[[StepMetrics], Path | None], say: Callable[[str], None]
    ) -> None:
        self._every, self._action, self._say = every, action, say

    def after_step(self, metrics: StepMetrics, *, is_last: bool) -> None:
        """Run the action when it is due; say where its result lies."""
        if is_last or (self._every is not None and metrics.step % self._every == 0):
            path = self._action(metrics)
            if path is not None:
                self._say(f"step {metrics.step}: wrote {path}")
