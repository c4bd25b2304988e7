"""Folders getting and losing the name of a checkpoint, each in one rename, without touching files of somebody else."""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import ParamSpec, TypeVar

from qwen_edit_zero.checkpoints import layout
from qwen_edit_zero.checkpoints.disk import sync_folder

_changing = threading.RLock()  # a backup's thread may delete while another save begins
P = ParamSpec("P")
T = TypeVar("T")


def _alone(function: Callable[P, T]) -> Callable[P, T]:
    @wraps(function)
    def locked(*args: P.args, **kwargs: P.kwargs) -> T:
        with _changing:
            return function(*args, **kwargs)

    return locked


def make_folder(path: Path) -> None:
    """Make a folder and those above it that are missing, so that their names survive power loss. Raises OSError."""
    if path.is_dir():
        return
    make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)


@_alone
def put_in_place(partial: Path, final: Path, step: int) -> None:
    """Give a finished folder its name; one of the same step that is there already is set aside first, deleted after.

    Raises OSError; then the one that was there has its name back. So it is if `partial` has gone: a newer run that took
    over the folder has deleted it.
    """
    replaced = None
    if final.exists() or final.is_symlink():
        replaced = layout.replaced_folder(final.parent, step)
        final.rename(replaced)
    try:
        partial.rename(final)
    except OSError:
        if replaced is not None:
            replaced.rename(final)
        raise
    sync_folder(final.parent)
    if replaced is not None:
        delete_checkpoint(replaced)
        sync_folder(final.parent)


@_alone
def delete_checkpoint(path: Path, *, unnamed: Callable[[], None] = lambda: None) -> None:
    """Delete a checkpoint folder, or, if it also holds files of somebody else, only the checkpoint's own files.

    Of a symbolic link only the link goes.

    The folder first leaves its name in one rename, so that an interruption leaves no half checkpoint under it; then
    `unnamed` is called, and then its files are deleted.
    """
    if path.is_symlink():
        path.unlink()
        return
    foreign = [p.name for p in path.iterdir() if not layout.is_own_file(p.name)]
    if not foreign:
        step = layout.step_of(path)
        assert step is not None
        doomed = layout.deleted_folder(path.parent, step)
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        unnamed()
        shutil.rmtree(doomed)
        return
    for name in (layout.MANIFEST, *sorted(p.name for p in path.iterdir() if layout.is_own_file(p.name))):
        (path / name).unlink(missing_ok=True)  # the manifest first: from then on it is no checkpoint
    if path.name.startswith("."):
        _show(path)


def _show(path: Path) -> None:
    """Give what is left of a replaced checkpoint a visible name."""
    base = path.name.removeprefix(".").replace(".", "-")
    for number in range(1, 1000):
        with contextlib.suppress(OSError):
            path.rename(path.with_name(base if number == 1 else f"{base}-{number}"))
            return


@_alone
def clean_leftovers(folder: Path) -> None:
    """Remove what runs that died left behind; give a checkpoint set aside for its replacement its name back.

    Called by the only writer of the folder, before it writes. Raises OSError.
    """
    for hidden in layout.hidden_folders(folder):
        final = folder / layout.checkpoint_name(hidden.step)
        if hidden.state != "replaced":
            shutil.rmtree(hidden.path)
        elif final.exists():
            delete_checkpoint(hidden.path)
        else:
            hidden.path.rename(final)
