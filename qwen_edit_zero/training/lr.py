"""The learning rate as a pure function of the step, so that resuming and changing engines cannot shift it."""

from __future__ import annotations

import math

from qwen_edit_zero.settings.models import ScheduleSettings


def lr_at(step: int, *, peak: float, total_steps: int, schedule: ScheduleSettings) -> float:
    """Learning rate of optimizer step `step` (0-based, skipped steps not counted) of `total_steps`.

    Linear warm-up from `peak / warmup` to `peak` over `schedule.warmup_steps`, then constant, or decay to
    `final_fraction * peak`, reached at the last step: linearly, or along half a cosine (SGDR, arXiv:1608.03983, eq. 5).
    """
    warmup = schedule.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if schedule.kind == "constant":
        return peak
    progress = min(1.0, (step - warmup) / max(1, total_steps - 1 - warmup))
    shape = 1.0 - progress if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return peak * (schedule.final_fraction + (1.0 - schedule.final_fraction) * shape)
