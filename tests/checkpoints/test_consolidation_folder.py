"""The folder of a consolidation: what is refused, who may write it, and what a kill or a full disk leaves."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qwen_edit_zero.checkpoints import components, consolidation_writer
from qwen_edit_zero.checkpoints.components import LINKED_FROM
from qwen_edit_zero.checkpoints.consolidate import consolidate
from qwen_edit_zero.checkpoints.consolidation_journal import JOURNAL
from qwen_edit_zero.edit_model.folder import ModelFolder, open_model_folder
from qwen_edit_zero.errors import CheckpointError, ModelFolderError, StorageError
from tests.checkpoints.trained_run import FROZEN, Weights, reference, save_weights

WEIGHTS = Path("transformer", "diffusion_pytorch_model.safetensors")


def _write(run: Path, out: Path, **options: Any) -> Path:
    known = {"dtype": "bf16", "open_model": open_model_folder, "components": "none", "say": lambda _: None}
    return consolidate(run, out, **(known | options))


def _in_child(call: Callable[[], object]) -> int:
    """The status with which a forked process ends that makes this call."""
    child = os.fork()
    if child == 0:
        try:
            call()
        finally:
            os._exit(1)
    return os.waitpid(child, 0)[1]


def _die(*_: object) -> None:
    os.kill(os.getpid(), 9)


def test_what_is_there_is_not_overwritten_by_accident(run: Path, tmp_path: Path) -> None:
    def again(out: Path, overwrite: bool) -> Path:
        return consolidate(run, out, dtype="bf16", open_model=open_model_folder, components="none", overwrite=overwrite)

    out = tmp_path / "out"
    out.mkdir()
    again(out, overwrite=False)
    before = (out / "consolidated.json").stat().st_ino
    with pytest.raises(CheckpointError, match="not empty: choose a new folder, or use --overwrite"):
        again(out, overwrite=False)
    assert (out / "consolidated.json").stat().st_ino == before
    (out / "transformer" / "note.txt").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds transformer/note\.txt .*did not write"):
        again(out, overwrite=True)
    (out / "transformer" / "note.txt").unlink()
    again(out, overwrite=True)
    assert (out / "consolidated.json").stat().st_ino != before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").touch()
    with pytest.raises(CheckpointError, match="was not written by this command and is not replaced"):
        again(tmp_path / "mine", overwrite=True)
    with pytest.raises(CheckpointError, match="lies inside the checkpoint"):
        again(run / "checkpoints" / "step-00000003" / "out", overwrite=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["mine", "out"]


def test_the_model_that_was_trained_from_is_not_overwritten(
    run: Path, base: ModelFolder, trained: Weights, tmp_path: Path
) -> None:
    out = _write(run, tmp_path / "model", components="copy")  # which the next run trains from
    model = reference(open_model_folder(str(out)), path=str(out))
    save_weights(tmp_path / "run" / "checkpoints", {n: w for n, w in trained.items() if n not in FROZEN}, model)
    before = (out / WEIGHTS).stat().st_ino
    for options in ({}, {"base_model": out}):
        with pytest.raises(CheckpointError, match=r"model is the model that the checkpoint was trained from"):
            _write(tmp_path / "run", out, overwrite=True, **options)
    assert (out / WEIGHTS).stat().st_ino == before
    shutil.copytree(out, tmp_path / "kept")
    _write(tmp_path / "run", out, overwrite=True, base_model=tmp_path / "kept")
    assert (out / WEIGHTS).stat().st_ino != before


def test_a_second_call_is_refused_while_one_writes(run: Path, tmp_path: Path) -> None:
    refused: list[str] = []

    def second(done: int, total: int) -> None:
        if not refused:
            with pytest.raises(CheckpointError, match="another consolidation is writing") as caught:
                _write(run, tmp_path / "out", dtype="fp32")
            refused.append(str(caught.value))

    out = _write(run, tmp_path / "out", progress=second)
    assert refused
    assert json.loads((out / "consolidated.json").read_text())["dtype"] == "bf16"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_the_lock_of_a_killed_call_does_not_hold(run: Path, tmp_path: Path) -> None:
    assert _in_child(lambda: _write(run, tmp_path / "out", progress=_die)) == 9
    assert (tmp_path / ".out.lock").exists()
    _write(run, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("out", [".", "..", "/"])
def test_the_current_folder_is_refused(out: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match=r"is the folder you are in, or holds it.*such as \./model"):
        _write(run, Path(out))


def test_killed_between_the_renames_of_overwrite_nothing_is_lost(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = _write(run, tmp_path / "out")
    rename = Path.rename
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", lambda self, to: _die() if self.name == ".out.partial" else rename(self, to))
        assert _in_child(lambda: _write(run, out, dtype="fp32", overwrite=True)) == 9
    assert not out.exists()
    said: list[str] = []
    with pytest.raises(CheckpointError, match="not empty"):
        _write(run, out, say=said.append)
    assert any("is back, which an interrupted call had set aside" in text for text in said)
    assert json.loads((out / "consolidated.json").read_text())["dtype"] == "bf16"
    _write(run, out, dtype="fp32", overwrite=True)
    assert json.loads((out / "consolidated.json").read_text())["dtype"] == "fp32"
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_everything_is_on_the_disk_before_the_folder_gets_its_name(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced, fsync, rename = set[str](), os.fsync, Path.rename
    missing: list[list[str]] = []

    def noting(fd: int) -> None:
        synced.add(os.readlink(f"/proc/self/fd/{fd}"))
        fsync(fd)

    def looking(self: Path, to: Path) -> Path:
        missing.append([str(p) for p in (self, *self.rglob("*")) if str(p) not in synced])
        return rename(self, to)

    monkeypatch.setattr(os, "fsync", noting)
    monkeypatch.setattr(Path, "rename", looking)
    out = _write(run, tmp_path / "out", components="copy")
    assert missing == [[]]
    assert (out / "vae" / "config.json").exists()


def _written_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the parts of weights written from now on."""
    sizes: list[int] = []
    do = consolidation_writer._do

    def noting(job: Any, *rest: Any) -> None:
        sizes.append(job.size)
        do(job, *rest)

    monkeypatch.setattr(consolidation_writer, "_do", noting)
    return sizes


@pytest.mark.parametrize("how", ["full", "killed"])
def test_finished_weights_stay_if_components_cannot_be_copied(
    how: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object, data: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(tmp_path / ".out.partial" / "vae" / "config.json"))

    with monkeypatch.context() as patch:
        patch.setattr(components, "_copy", lambda source, target: full(source, target) if how == "full" else _die())
        if how == "full":
            with pytest.raises(StorageError, match=r"No space left.*\.out\.partial/vae.*weights are whole and stay in"):
                _write(run, tmp_path / "out", components="copy")
        else:
            assert _in_child(lambda: _write(run, tmp_path / "out", components="copy")) == 9
    again = _written_bytes(monkeypatch)
    out = _write(run, tmp_path / "out", components="copy")
    assert again == []
    whole = _write(run, tmp_path / "whole")
    assert (out / WEIGHTS).read_bytes() == (whole / WEIGHTS).read_bytes()
    assert not list(out.rglob(JOURNAL))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out", "whole"]


def test_a_file_that_cannot_be_written_is_named_and_not_the_one_it_is_copied_from(
    base: ModelFolder, tmp_path: Path
) -> None:
    brought = components.plan_components(base.path, tmp_path, "copy")
    (tmp_path / "model_index.json").mkdir()  # in the way
    with pytest.raises(OSError, match="model_index") as caught:
        components.add_components(brought, tmp_path)
    assert caught.value.filename == str(tmp_path / "model_index.json")


def test_room_for_copies_is_counted_before_a_byte_is_written(
    base: ModelFolder, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(base.path, moved)
    with (moved / "text_encoder" / "large.bin").open("wb") as file:
        file.truncate(LINKED_FROM)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=LINKED_FROM))
    with pytest.raises(StorageError, match=rf"needs .* more, and the file system of {tmp_path} has 67\.1 MB free"):
        _write(run, tmp_path / "out", base_model=moved, components="copy")
    assert [p.name for p in tmp_path.iterdir()] == ["moved"]
    _write(run, tmp_path / "out", base_model=moved, components="link")


def test_a_component_that_the_base_model_lacks_is_told_before_a_byte_is_written(
    base: ModelFolder, run: Path, tmp_path: Path
) -> None:
    moved = tmp_path / "moved"
    shutil.copytree(base.path, moved)
    index = json.loads((moved / "model_index.json").read_text())
    (moved / "model_index.json").write_text(json.dumps(index | {"image_encoder": ["transformers", "CLIP"]}))
    with pytest.raises(ModelFolderError, match="names the component image_encoder"):
        _write(run, tmp_path / "out", base_model=moved, components="copy", progress=_die)
    assert [p.name for p in tmp_path.iterdir()] == ["moved"]


@pytest.fixture
def half(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The `transformer` folder that a killed call left, with every finished part in its journal; in several files."""
    with monkeypatch.context() as patch:
        patch.setattr(consolidation_writer, "_NOTED_EVERY", -1.0)
        dying = {"progress": lambda done, total: _die() if done > 0.6 * total else None, "threads": 1}
        assert _in_child(lambda: _write(run, tmp_path / "out", shard_bytes=2**20, **dying)) == 9
    return tmp_path / ".out.partial" / "transformer"


@pytest.fixture
def right(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return _write(run, tmp_path_factory.mktemp("right") / "out", shard_bytes=2**20) / "transformer"


def _equal(one: Path, other: Path) -> bool:
    names = sorted(p.name for p in other.iterdir())
    return sorted(p.name for p in one.iterdir()) == names and all(
        (one / n).read_bytes() == (other / n).read_bytes() for n in names
    )


def test_a_bad_line_in_the_journal_does_not_count_nor_what_follows(
    half: Path, right: Path, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = half / JOURNAL
    lines = journal.read_bytes().split(b"\n")
    assert len(lines) > 20
    journal.write_bytes(b"\n".join([*lines[:10], b"\0\xff7", *lines[11:]]))
    again = _written_bytes(monkeypatch)
    _write(run, tmp_path / "out", shard_bytes=2**20)
    index = json.loads((right / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert len(again) == len(index["weight_map"]) - 9  # below the line of the identity
    assert _equal(tmp_path / "out" / "transformer", right)


@pytest.mark.parametrize("loss", ["missing", "short"])
def test_a_weight_file_that_is_gone_is_written_again_even_after_another_kill(
    loss: str, half: Path, right: Path, run: Path, tmp_path: Path
) -> None:
    first = min(half.glob("*.safetensors"))
    if loss == "missing":
        first.unlink()
    else:
        os.truncate(first, first.stat().st_size // 2)
    assert _in_child(lambda: _write(run, tmp_path / "out", shard_bytes=2**20, progress=_die)) == 9
    _write(run, tmp_path / "out", shard_bytes=2**20)
    assert _equal(tmp_path / "out" / "transformer", right)
