"""What is deleted, what stays, and the second copy."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen_edit_zero.checkpoints.backup import backup_checkpoint
from qwen_edit_zero.checkpoints.describe import list_checkpoints, show_checkpoint, verify_text
from qwen_edit_zero.checkpoints.retention import Retention, prune
from qwen_edit_zero.checkpoints.validity import verify_checkpoint
from qwen_edit_zero.errors import CheckpointError, StorageError
from tests.checkpoints.states import differing_bytes, made_up_state, save


def _names(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_only_the_newest_stay(tmp_path: Path) -> None:
    for step in (8, 9, 10, 11):
        save(tmp_path, step, retention=Retention(keep=2))
    assert _names(tmp_path) == ["step-00000010", "step-00000011"]


def test_a_damaged_checkpoint_neither_counts_nor_goes(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save(tmp_path, step)
    (tmp_path / "step-00000003" / "rank-00000.safetensors").unlink()
    assert prune(tmp_path, Retention(keep=1)) == [tmp_path / "step-00000001"]
    assert _names(tmp_path) == ["step-00000002", "step-00000003"]


def test_the_one_just_written_stays_also_among_later_steps_of_an_earlier_run(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        save(tmp_path, step)
    save(tmp_path, 50, retention=Retention(keep=2))
    assert _names(tmp_path) == ["step-00000050", "step-00000300"]


def test_files_of_others_are_never_deleted(tmp_path: Path) -> None:
    for step in (1, 2):
        save(tmp_path, step)
    kept = tmp_path / "step-00000001"
    (kept / "notes.txt").write_text("mine")
    (tmp_path / "step-1").mkdir()
    (tmp_path / ".step-00000007.partial.txt").touch()
    elsewhere = save(tmp_path / "elsewhere", 0)
    (tmp_path / "step-00000000").symlink_to(elsewhere)
    save(tmp_path, 3, retention=Retention(keep=1))
    assert _names(tmp_path) == [
        ".step-00000007.partial.txt", "elsewhere", "step-00000000", "step-00000001", "step-00000003", "step-1"
    ]  # fmt: skip
    assert _names(kept) == ["notes.txt"]
    assert verify_checkpoint(elsewhere) == ()


def test_replacing_a_step_keeps_files_of_others(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "notes.txt").write_text("mine")
    save(tmp_path, 1)
    assert _names(tmp_path) == ["step-00000001", "step-00000001-replaced"]
    assert (tmp_path / "step-00000001-replaced" / "notes.txt").read_text() == "mine"


def test_backup_is_a_verified_copy(tmp_path: Path) -> None:
    place = tmp_path / "backup"
    path = save(tmp_path / "run", 4)
    backup_checkpoint(path, place)
    assert _names(place) == ["step-00000004"]
    assert differing_bytes(place / path.name, made_up_state(4)) == 0
    assert verify_checkpoint(place / path.name) == ()
    before = (place / path.name).stat().st_mtime_ns
    backup_checkpoint(path, place)
    assert (place / path.name).stat().st_mtime_ns == before


def test_a_damaged_checkpoint_is_not_backed_up(tmp_path: Path) -> None:
    path = save(tmp_path / "run", 4)
    file = path / "rank-00000.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    with pytest.raises(StorageError, match=r"rank-00000\.safetensors is damaged"):
        backup_checkpoint(path, tmp_path / "backup")
    assert _names(tmp_path / "backup") == []


def test_list_show_and_verify(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints"
    for step in (1, 2, 3):
        save(folder, step)
    (folder / "step-00000003" / "run_state.json").unlink()
    (folder / ".step-00000004.partial").mkdir()
    listed = list_checkpoints(tmp_path / "run").splitlines()
    assert [line.split()[0] for line in listed[2:5]] == ["1", "2", "3"]
    assert [line.split()[-1] for line in listed[2:5]] == ["whole", "whole", "usable"]
    assert "misses run_state.json" in listed[5]
    assert ".step-00000004.partial" in listed[6]
    shown = show_checkpoint(tmp_path / "run")
    assert "step-00000002" in shown
    assert "samples seen    16" in shown
    assert "exp_avg" in shown
    assert verify_text(folder / "step-00000002")[1]
    data = folder / "step-00000002" / "rank-00000.safetensors"
    data.write_bytes(data.read_bytes()[:-1] + b"x")
    text, sound = verify_text(folder / "step-00000002")
    assert not sound
    assert "rank-00000.safetensors: it is damaged" in text
    with pytest.raises(CheckpointError, match="does not exist"):
        list_checkpoints(tmp_path / "nowhere")
