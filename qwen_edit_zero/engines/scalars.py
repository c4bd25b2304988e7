"""Reading the saved scalars of an engine."""

from __future__ import annotations

from collections.abc import Mapping

from qwen_edit_zero.errors import CheckpointError


def optimizer_steps(scalars: Mapping[str, int | float | bool | str]) -> int:
    """The number of applied optimizer steps. Raises CheckpointError if it is not there."""
    try:
        return int(scalars["optimizer_steps"])
    except KeyError:
        raise CheckpointError(
            "The checkpoint's engine state has no 'optimizer_steps', without which AdamW's bias correction is "
            "unknown; it is damaged or was not written by this program."
        ) from None
