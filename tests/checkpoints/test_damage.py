"""Damage of every kind is found and named; nothing damaged is ever taken for whole."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from qwen_edit_zero.checkpoints.manifest import load_manifest, parse_manifest
from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.checkpoints.validity import find_checkpoint, latest_checkpoint, verify_checkpoint
from qwen_edit_zero.errors import CheckpointError
from tests.checkpoints.states import save

DATA = "rank-00000.safetensors"


def _flip(file: Path, position: int) -> None:
    content = bytearray(file.read_bytes())
    content[position] ^= 0x10
    file.write_bytes(content)


def test_a_flipped_bit_is_found_by_verify_and_by_reading(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    tensor = next(t for t in load_manifest(path).tensors if t.name == "block.weight" and t.kind == "exp_avg")
    _flip(path / DATA, tensor.ranges[1].offset + 3)
    (fault,) = verify_checkpoint(path)
    assert fault.file == DATA
    assert f"block.weight (exp_avg), elements {tensor.ranges[1].start} to" in fault.message
    with CheckpointReader(path) as reader:
        reader.read("block.weight", 0, 37 * 53, "param")
        with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors is damaged: block\.weight \(exp_avg\)"):
            reader.read("block.weight", 0, 37 * 53, "exp_avg")
        with pytest.raises(CheckpointError, match="is damaged"):
            list(reader.stream("block.weight", "exp_avg"))


def test_counters_that_were_edited_are_found_by_verify_and_by_reading(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    _flip(path / "run_state.json", 20)
    assert [fault.file for fault in verify_checkpoint(path)] == ["run_state.json"]
    with CheckpointReader(path) as reader, pytest.raises(CheckpointError, match=r"run_state\.json is damaged"):
        _ = reader.run_state


def test_a_manifest_with_any_bit_flipped_is_refused(tmp_path: Path) -> None:
    content = (save(tmp_path, 1) / "manifest.json").read_bytes()
    parse_manifest(content)
    for position in range(0, len(content), 3):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(CheckpointError):
            parse_manifest(bytes(damaged))
    for length in range(0, len(content), 97):
        with pytest.raises(CheckpointError):
            parse_manifest(content[:length])


def _truncate(path: Path) -> None:
    with (path / DATA).open("r+b") as file:
        file.truncate(1000)


def _other_save(path: Path) -> None:
    shutil.copy(path.with_name("step-00000001") / DATA, path / DATA)


def _edit(path: Path) -> None:
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"step": 2', '"step": 1'))


def _newer_format(path: Path) -> None:
    manifest = path / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"format_version": 2', '"format_version": 3'))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / DATA).unlink(), "misses rank-00000.safetensors"),
        (lambda path: (path / "run_state.json").unlink(), "misses run_state.json"),
        (lambda path: (path / DATA).write_bytes(b""), "has 0 bytes instead of"),
        (_truncate, "has 1000 bytes instead of"),
        (_other_save, "is not of the same save"),
        (lambda path: (path / "manifest.json").unlink(), "has no manifest.json"),
        (lambda path: (path / "manifest.json").write_bytes(b""), "is cut short"),
        (_edit, "was edited"),
        (_newer_format, "has format version 3"),
        (lambda path: path.rename(path.with_name("step-00000009")), "named as step 9, but its manifest is of step 2"),
    ],
    ids=["file missing", "state missing", "empty", "truncated", "mixed", "no manifest", "empty manifest", "edited",
         "newer format", "renamed"],
)  # fmt: skip
def test_a_damaged_checkpoint_is_passed_over_with_the_reason(
    damage: Callable[[Path], object], reason: str, tmp_path: Path
) -> None:
    older, newer = save(tmp_path / "checkpoints", 1), save(tmp_path / "checkpoints", 2)
    assert newer.stat().st_size
    damage(newer)
    for found in (latest_checkpoint(tmp_path / "checkpoints"), find_checkpoint(tmp_path)):
        assert found.path == older
        ((passed, why),) = found.passed_over
        assert passed.name in ("step-00000002", "step-00000009")
        assert reason in why
    with pytest.raises(CheckpointError, match=reason.replace(".", r"\.")):
        find_checkpoint(passed)


def test_a_file_of_another_rank_count_does_not_belong(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    shutil.copy(path / DATA, path / "rank-00001.safetensors")
    (fault,) = verify_checkpoint(path)
    assert (fault.file, fault.message) == ("rank-00001.safetensors", "it does not belong to this checkpoint")


def test_a_run_without_checkpoints_has_none(tmp_path: Path) -> None:
    assert latest_checkpoint(tmp_path / "checkpoints").path is None
    (tmp_path / "checkpoints").mkdir()
    assert latest_checkpoint(tmp_path / "checkpoints").path is None
    with pytest.raises(CheckpointError, match="holds no valid checkpoint: no checkpoint was finished in it"):
        find_checkpoint(tmp_path)


def test_a_link_to_a_disk_that_has_gone_is_not_taken_for_a_run_without_checkpoints(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").symlink_to(tmp_path / "gone")
    with pytest.raises(CheckpointError, match=r"is a link to .*/gone, which is no folder now: is its file system"):
        latest_checkpoint(tmp_path / "checkpoints")
    (tmp_path / "checkpoints").unlink()
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointError, match="is a file, where checkpoints would be; move it away"):
        latest_checkpoint(tmp_path / "checkpoints")


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["mp_rank_00_model_states.pt", "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"], "written by DeepSpeed"),
        ([".metadata", "__0_0.distcp"], "torch distributed checkpoint"),
        (["model_index.json"], "a model folder"),
        (["notes.txt"], "neither manifest.json"),
        ([], "it is empty"),
    ],
)
def test_something_else_than_a_checkpoint_is_called_by_its_name(names: list[str], words: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=words):
        find_checkpoint(tmp_path)


def test_step_order_is_numeric_beyond_eight_digits(tmp_path: Path) -> None:
    save(tmp_path, 99_999_999)
    newest = save(tmp_path, 100_000_000)
    assert newest.name == "step-100000000"
    assert latest_checkpoint(tmp_path).path == newest


def test_a_table_of_ranges_with_any_bit_flipped_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    table = path / "ranges.safetensors"
    content = table.read_bytes()
    for position in range(0, len(content), 41):
        table.write_bytes(content)
        _flip(table, position)
        with pytest.raises(CheckpointError, match=r"ranges\.safetensors cannot be used"):
            CheckpointReader(path)
    _flip(path / DATA, 5000)  # beside the damaged table
    assert {fault.file for fault in verify_checkpoint(path)} == {"ranges.safetensors", DATA}
