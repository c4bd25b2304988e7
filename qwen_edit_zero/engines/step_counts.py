"""How many steps AdamW has done on each parameter, on which its bias correction depends.

Every engine here steps all trained parameters together, so that one number says it for all. A run that was begun
elsewhere may have parameters with fewer: `torch.optim.AdamW` leaves one without gradient out of a step. They stay as
far behind as they came.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from qwen_edit_zero.errors import CheckpointError

COMMON, OTHERS = "optimizer_steps", "parameter_steps"  # in the saved scalars of an engine


class StepCounts:
    """The number of applied optimizer steps, and by how many some parameters are behind it.

    Attributes:
        common: steps applied; the position of the learning-rate schedule.
    """

    def __init__(self, common: int = 0, behind: Mapping[str, int] | None = None) -> None:
        self.common = common
        self._behind = dict(behind or {})

    @classmethod
    def of_scalars(cls, scalars: Mapping[str, Any], trained: Collection[str]) -> StepCounts:
        """What `scalars` gave when it was saved.

        Raises CheckpointError if there are no counts, or counts that parameters of this name cannot have.
        """
        common: Any = scalars.get(COMMON)
        if not _is_count(common):
            raise CheckpointError(
                f"The checkpoint's engine state has no '{COMMON}', without which AdamW's bias correction is unknown; "
                f"it is damaged or was not written by this program."
            )
        others = scalars.get(OTHERS, {})
        for name, count in others.items():
            if name not in trained or not _is_count(count) or count > common:
                raise CheckpointError(
                    f"The checkpoint says that the optimizer has done {count!r} steps on '{name}', of {common} in all: "
                    + ("that cannot be." if name in trained else "this run does not train it.")
                )
        return cls(common, {name: common - count for name, count in others.items() if count != common})

    @property
    def differ(self) -> bool:
        """Whether some parameter has done fewer steps than the others."""
        return bool(self._behind)

    def of(self, name: str) -> int:
        """Steps done on a parameter."""
        return self.common - self._behind.get(name, 0)

    def scalars(self) -> dict[str, Any]:
        """To be saved: the common count, and the counts that are not equal to it by name, if there are any."""
        others = {name: self.of(name) for name in self._behind}
        return {COMMON: self.common} | ({OTHERS: others} if others else {})


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
