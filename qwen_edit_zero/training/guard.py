"""Loss spikes: notices a step whose loss or gradient is far above what is usual, before it changes the weights.

The usual is robust: median and median absolute deviation over the last steps that were applied, so that one spike does
not widen what counts as usual. All numbers are sums over ranks, so every rank decides alike, and a run that goes on
from a checkpoint decides as the one that wrote it: the window travels with the checkpoint.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from qwen_edit_zero.errors import DivergenceError
from qwen_edit_zero.settings.models import GuardSettings

ENOUGH = 20  # applied steps by which the usual is known
STATE = "guard"  # in the run state of checkpoints
_SHOWN = 16  # samples named
_TO_SIGMA = 1.4826  # median absolute deviation to standard deviation, of a normal distribution
_LEAST_SPREAD = 0.01  # of the median: a loss that hardly varies makes no spike of its last digits


class RollBack(Exception):
    """The run is to go back to a checkpoint before `step`; not an error."""

    def __init__(self, step: int, why: str) -> None:
        super().__init__(why)
        self.step, self.why = step, why


class SpikeGuard:
    """Judges steps; the same calls on every rank.

    Attributes:
        left_out: steps whose samples are not trained on, after a spike was rolled back.
        has_checkpoint: whether there is one to go back to; without, a spike is only skipped.
        reason: why the step judged last is a spike; None if it is none.
    """

    def __init__(self, settings: GuardSettings) -> None:
        self._settings = settings
        self._losses: deque[float] = deque(maxlen=settings.window)
        self._norms: deque[float] = deque(maxlen=settings.window)
        self._actions = 0
        self._loss = math.nan
        self.left_out: set[int] = set()
        self.has_checkpoint = False
        self.reason: str | None = None

    @property
    def on(self) -> bool:
        """Whether it does anything."""
        return self._settings.action != "off"

    @property
    def rolls_back(self) -> bool:
        """Whether a spike leads back to a checkpoint."""
        return self._settings.action == "rollback" and self.has_checkpoint

    def expect(self, loss: float) -> None:
        """The mean loss of the step whose gradient is about to be judged."""
        self._loss = loss

    def veto(self, norm: float) -> bool:
        """Whether the step is a spike, and not to be applied. For `ParallelEngine.veto`."""
        self.reason = None
        if not math.isfinite(self._loss):
            return False  # then the gradient will not be finite for long, either
        found = []
        if len(self._losses) >= ENOUGH:
            # Norms vary by factors, losses by differences.
            far = {
                "loss": (self._loss, self._losses, _deviations(self._loss, self._losses)),
                "gradient norm": (norm, self._norms, _deviations(_log(norm), [_log(n) for n in self._norms])),
            }
            found = [
                f"{what} {value:.4g} is {deviations:.1f} deviations above the usual {statistics.median(window):.4g}"
                for what, (value, window, deviations) in far.items()
                if deviations > self._settings.threshold
            ]
        self.reason = "; ".join(found) or None
        if self.reason is None:
            self._losses.append(self._loss)
            self._norms.append(norm)
        return self.reason is not None

    def act(self, step: int, samples: Sequence[str]) -> str:
        """Count a spike; returns what is recorded of it. Raises RollBack, and DivergenceError if there were too many.

        `samples`: ids of the step's samples.
        """
        more = f" and {len(samples) - _SHOWN} more" if len(samples) > _SHOWN else ""
        why = f"{self.reason}; samples {', '.join(samples[:_SHOWN])}{more}"
        self._actions += 1
        if self._actions > self._settings.most:
            raise DivergenceError(
                f"the guard has met {self._actions} spikes, the last at step {step}: {why}. More than run.guard.most="
                f"{self._settings.most} mean that the run itself diverges: lower optimizer.lr, or look at the samples "
                "that events.jsonl names"
            )
        if self.rolls_back:
            raise RollBack(step, why)
        return why

    def leave_out(self, step: int) -> None:
        """Do not train on the samples of the steps that led up to a spike, this one included."""
        self.left_out |= set(range(max(1, step - self._settings.leave_out + 1), step + 1))

    def state(self) -> dict[str, Any]:
        """JSON values; for checkpoints."""
        return {
            "losses": list(self._losses),
            "norms": list(self._norms),
            "actions": self._actions,
            "left_out": sorted(self.left_out),
        }

    def load(self, state: Mapping[str, Any], *, keep: bool = False) -> None:
        """Go on from the state of a checkpoint. `keep`: what was learnt since stays, since the run goes back to it."""
        left_out = {int(step) for step in state.get("left_out", [])}
        actions = int(state.get("actions", 0))
        self.left_out = self.left_out | left_out if keep else left_out
        self._actions = max(self._actions, actions) if keep else actions
        for window, values in ((self._losses, state.get("losses", [])), (self._norms, state.get("norms", []))):
            window.clear()
            window.extend(float(value) for value in values)


def _log(norm: float) -> float:
    return math.log(max(norm, 1e-30))


def _deviations(value: float, window: Sequence[float]) -> float:
    """Robust z-score: how many deviations `value` lies above the median of the window."""
    middle = statistics.median(window)
    spread = _TO_SIGMA * statistics.median(abs(other - middle) for other in window)
    return (value - middle) / max(spread, _LEAST_SPREAD * abs(middle), _LEAST_SPREAD**2)
