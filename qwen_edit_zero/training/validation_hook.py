"""When the loss on held-out samples is computed in a run, and where it goes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from qwen_edit_zero.cluster.collectives import from_rank_0
from qwen_edit_zero.cluster.pulse import position
from qwen_edit_zero.training.held_out_records import HELD_OUT
from qwen_edit_zero.training.metrics import MetricsWriter, StepMetrics
from qwen_edit_zero.training.progress import Progress
from qwen_edit_zero.training.validation import HeldOutLoss, HeldOutMeasure, to_record

METRIC = "validation"  # in the manifest of checkpoints
_NAMED = 5  # samples in a warning


class ValidationHook:
    """Computes the held-out loss before the first step, every `every` steps and after the last. A hook, on every rank.

    What a run has recorded before it goes on counts on: the best so far, if it is of the same samples, noise and
    weights; else the best begins anew, with a value before the next step.

    Args:
        writer: on rank 0 only.
        event: records an event of the run.
    """

    def __init__(
        self,
        measure: HeldOutMeasure,
        every: int,
        progress: Progress,
        writer: MetricsWriter | None,
        event: Callable[..., None],
    ) -> None:
        self._measure, self._every = measure, every
        self._progress, self._writer, self._event = progress, writer, event
        self._set = measure.fingerprint
        self._best: tuple[float, int] | None = None  # loss and step; rank 0
        self._last: tuple[int, float] | None = None  # step and loss

    def begin(self, first: int) -> None:
        """Say what will be computed; compute a value unless the run has what it needs from earlier. Collective.

        `first` are the steps done. A value that was due after them is missing where the run was asked to end just then.
        """
        self._progress.say(
            f"held-out loss: {self._measure.describe()}, before the first step, every {self._every} steps and at the "
            "end"
        )
        known = self._remember(first) if self._writer is not None else None
        if not from_rank_0(known):
            self._compute(first)

    def after_step(self, metrics: StepMetrics, *, is_last: bool) -> None:
        """Compute a value if it is due. Collective."""
        if is_last or metrics.step % self._every == 0:
            self._compute(metrics.step)

    def recorded(self, step: int) -> dict[str, float]:
        """What a checkpoint of this step records."""
        return {METRIC: self._last[1]} if self._last is not None and self._last[0] == step else {}

    def _remember(self, first: int) -> bool:
        """Take over what was recorded before; whether there is anything to go by, and the value due now."""
        assert self._writer is not None
        before = self._writer.held_out
        same = [record for record in before if record.get("held_out_set") == self._set]
        if before and not same:
            self._progress.say(
                "held-out loss: its samples, noise levels, seed or weights are others than before; earlier values do "
                "not compare, and the best begins anew"
            )
        for record in same:
            self._judge(int(record["step"]), record[HELD_OUT])
        is_due = first % self._every == 0
        return any(not is_due or record["step"] == first for record in same)

    def _judge(self, step: int, loss: Any) -> None:
        """Keep the best; of equal ones the earlier."""
        if isinstance(loss, float) and math.isfinite(loss) and (self._best is None or loss < self._best[0]):
            self._best = (loss, step)

    def _compute(self, step: int) -> None:
        position.end("computing the held-out loss")
        found = self._measure.compute()
        position.end("between steps")
        self._last = (step, found.loss)
        if self._writer is None:
            return
        self._judge(step, found.loss)
        self._writer.write_held_out(to_record(found, step=step, set_name=self._set))
        best = {} if self._best is None else {"best": self._best[0], "best_step": self._best[1]}
        self._event("validation", step=step, loss=found.loss if math.isfinite(found.loss) else None, **best)
        self._progress.say(self._line(step, found))

    def _line(self, step: int, found: HeldOutLoss) -> str:
        if found.bad:
            more = f" and {len(found.bad) - _NAMED} more" if len(found.bad) > _NAMED else ""
            named = ", ".join(found.bad[:_NAMED]) + more
            return f"warning: step {step}: the held-out loss is not finite, by sample {named}"
        if self._best is None or self._best[1] == step:
            place = "" if step == 0 else " (the best so far)"
        else:
            place = f" (best {self._best[0]:.4f} at step {self._best[1]})"
        levels = "  ".join(f"{name}: {value:.4f}" for name, value in found.by_sigma.items())
        return f"step {step}: held-out loss {found.loss:.4f}{place}; by noise level {levels}"
