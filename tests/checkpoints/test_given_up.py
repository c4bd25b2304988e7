"""A run that goes back to an earlier checkpoint does not return by itself to the course that it left."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen_edit_zero.checkpoints.describe import list_checkpoints
from qwen_edit_zero.checkpoints.given_up import FILE, given_up, go_back
from qwen_edit_zero.checkpoints.manifest import load_head
from qwen_edit_zero.checkpoints.retention import Retention, prune
from qwen_edit_zero.checkpoints.validity import find_checkpoint, latest_checkpoint
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.training.resume import CheckpointChoice
from tests.checkpoints.states import save


def _names(paths: list[Path]) -> list[str]:
    return [path.name for path in paths]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for step in (2, 4, 6):
        save(tmp_path / "run" / "checkpoints", step)
    return tmp_path / "run" / "checkpoints"


def test_auto_goes_on_with_the_course_that_was_chosen_by_path(folder: Path) -> None:
    told: list[str] = []
    back = folder / "step-00000002"
    CheckpointChoice(str(back), folder, told.append, rank=0).went_on_from(back)
    assert "step-00000004, step-00000006" in told[0]
    assert "given up" in told[0]
    auto = CheckpointChoice("auto", folder, told.append, rank=0)
    assert auto.next() == back
    auto.went_on_from(back)
    assert "passing over checkpoint step-00000006: it was given up when the run went back" in told[1]
    assert find_checkpoint(folder.parent).path == back
    assert list_checkpoints(folder.parent).count("given up") == 2
    newer = save(folder, 3)
    assert latest_checkpoint(folder).path == newer
    again = save(folder, 6)  # of the new course, in the place of the old one
    assert latest_checkpoint(folder).path == again


def test_one_that_was_given_up_can_be_chosen_again(folder: Path) -> None:
    assert _names(go_back(folder, folder / "step-00000002")) == ["step-00000004", "step-00000006"]
    assert go_back(folder, folder / "step-00000004") == []
    assert latest_checkpoint(folder).path == folder / "step-00000004"
    assert go_back(folder, folder / "step-00000006") == []
    assert latest_checkpoint(folder).path == folder / "step-00000006"
    assert given_up(folder) == frozenset()


def test_for_a_checkpoint_of_another_run_all_are_given_up(folder: Path, tmp_path: Path) -> None:
    assert len(go_back(folder, save(tmp_path / "other", 9))) == 3
    assert latest_checkpoint(folder).path is None


def test_what_was_given_up_pushes_out_none_that_counts(folder: Path) -> None:
    go_back(folder, folder / "step-00000002")
    save(folder, 3)
    save(folder, 8)
    prune(folder, Retention(keep=2))
    assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == ["step-00000003", "step-00000008"]


def test_saves_that_are_gone_are_forgotten(folder: Path) -> None:
    go_back(folder, folder / "step-00000002")
    prune(folder, Retention(keep=1), newest=save(folder, 8))
    save(folder, 9)
    go_back(folder, folder / "step-00000008")
    assert given_up(folder) == {load_head(folder / "step-00000009").save_id}


@pytest.mark.parametrize("content", ["[1]", "{}", '["', "\xff"])
def test_a_damaged_list_is_refused(content: str, folder: Path) -> None:
    (folder / FILE).write_bytes(content.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"\.given-up\.json cannot be read .*delete it if"):
        latest_checkpoint(folder)
