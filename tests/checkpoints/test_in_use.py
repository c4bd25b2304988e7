"""A reader and a deletion that meet."""

from __future__ import annotations

import fcntl
import threading
from pathlib import Path

import pytest

from qwen_edit_zero.checkpoints.in_use import DeletionLock, ReadLock, deletion_lock
from tests.checkpoints.states import save


def _is_held(checkpoint: Path) -> bool:
    with deletion_lock(checkpoint) as lock:
        return not lock.free


def test_a_reader_that_comes_while_somebody_looks_whether_it_may_be_deleted_is_protected_after_all(
    tmp_path: Path,
) -> None:
    path = save(tmp_path, 1)
    deletion = DeletionLock(path)
    threading.Timer(0.2, deletion.release).start()
    reader = ReadLock(path)
    assert _is_held(path)
    reader.release()
    assert not _is_held(path)


def test_a_reader_whose_checkpoint_is_renamed_away_before_its_lock_locks_what_has_the_name_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, other, deleted = save(tmp_path, 1), save(tmp_path / "new", 1), tmp_path / ".step-00000001.deleted"
    lock = fcntl.flock

    def late(fd: int, operation: int) -> None:
        if other.exists():
            path.rename(deleted)
            other.rename(path)
        lock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    reader = ReadLock(path)
    assert _is_held(path)
    assert not _is_held(deleted)
    reader.release()
    assert not _is_held(path)
