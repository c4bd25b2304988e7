"""Which checkpoints stay."""

from __future__ import annotations

from pathlib import Path

from qwen_edit_zero.checkpoints import layout
from qwen_edit_zero.checkpoints.placement import delete_checkpoint
from qwen_edit_zero.checkpoints.validity import is_valid


def prune(folder: Path, keep: int, *, protect: Path | None = None) -> list[Path]:
    """Delete all but the newest `keep` valid checkpoints (and `protect`); returns those that are gone.

    Only valid ones are counted, and only valid ones are deleted: a damaged folder neither pushes out a good one nor
    disappears before somebody has looked at it. Symbolic links and folders of other names are left alone.
    Raises OSError.
    """
    assert keep >= 1, "a run without any checkpoint cannot be resumed"
    kept = 0 if protect is None else 1
    gone = []
    for path in reversed(layout.checkpoint_folders(folder)):
        if path == protect or not is_valid(path):
            continue
        if kept < keep:
            kept += 1
        elif not path.is_symlink():
            delete_checkpoint(path)
            gone.append(path)
    return gone
