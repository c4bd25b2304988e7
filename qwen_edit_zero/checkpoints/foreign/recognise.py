"""Which program wrote a folder, told by what is in it."""

from __future__ import annotations

from pathlib import Path

from qwen_edit_zero.checkpoints import layout
from qwen_edit_zero.checkpoints.foreign.dcp import looks_like_dcp, open_dcp
from qwen_edit_zero.checkpoints.foreign.deepspeed import open_deepspeed
from qwen_edit_zero.checkpoints.foreign.deepspeed_folder import looks_like_deepspeed
from qwen_edit_zero.checkpoints.foreign.source import ForeignState
from qwen_edit_zero.errors import CheckpointError


def is_foreign(path: Path) -> bool:
    """Whether a folder is a checkpoint of another program that can be read here."""
    if not path.is_dir() or (path / layout.MANIFEST).exists() or layout.holds_checkpoints(path):
        return False  # ours, whatever lies beside it
    return looks_like_dcp(path) or looks_like_deepspeed(path)


def open_foreign(path: Path) -> ForeignState:
    """Describe the checkpoint of another program. Raises CheckpointError if it is not whole."""
    assert is_foreign(path), path
    try:
        return open_dcp(path) if looks_like_dcp(path) else open_deepspeed(path)
    except (TypeError, ValueError, KeyError, IndexError, AttributeError, OverflowError) as error:
        raise CheckpointError(
            f"{path} is damaged, or laid out in a way that is not known here ({type(error).__name__}: {error})"
        ) from error
