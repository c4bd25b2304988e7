"""Dynamic loss scaling for fp16, one implementation for every engine."""

from __future__ import annotations

from collections.abc import Mapping

from qwen_edit_zero.settings.models import PrecisionSettings


class LossScale:
    """Doubles after `loss_scale_window` good steps in a row, halves (down to `min_loss_scale`) after a bad one.

    Outside fp16 the scale is 1.0 for ever and `scalars()` is empty. The rule is that of Micikevicius et al., "Mixed
    Precision Training" (2018), section 3.2.
    """

    def __init__(self, precision: PrecisionSettings) -> None:
        self.enabled = precision.mode == "fp16"
        self.value = precision.initial_loss_scale if self.enabled else 1.0
        self._window = precision.loss_scale_window
        self._minimum = precision.min_loss_scale
        self._good_steps = 0

    def update(self, *, finite: bool) -> None:
        """Adapt the scale to the outcome of a step."""
        if not self.enabled:
            return
        if not finite:
            self.value = max(self.value / 2.0, self._minimum)
            self._good_steps = 0
            return
        self._good_steps += 1
        if self._good_steps == self._window:
            self.value *= 2.0
            self._good_steps = 0

    def scalars(self) -> dict[str, float | int]:
        """The state to be saved; empty outside fp16."""
        if not self.enabled:
            return {}
        return {"loss_scale": self.value, "loss_scale_good_steps": self._good_steps}

    def load(self, scalars: Mapping[str, int | float | bool | str]) -> None:
        """Take over saved state. A checkpoint written in another precision has none: the initial scale stays."""
        if self.enabled and "loss_scale" in scalars:
            self.value = float(scalars["loss_scale"])
            self._good_steps = int(scalars["loss_scale_good_steps"])
