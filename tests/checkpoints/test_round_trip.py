"""What is saved is read back bit for bit, whoever wrote it and whoever reads it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import load_file

from qwen_edit_zero.checkpoints.layout import RANGES
from qwen_edit_zero.checkpoints.manifest import load_manifest
from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.checkpoints.validity import latest_checkpoint, verify_checkpoint
from qwen_edit_zero.errors import CheckpointError, StorageError
from qwen_edit_zero.flat_state import FlatRange
from tests.checkpoints.states import MODEL, differing_bytes, made_up_state, save
from tests.ranks import run_ranks


def _save_on_rank(rank: int, world: int, folder: Path, step: int) -> Path:
    return save(folder, step, rank=rank, world=world, seed=step)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_every_bit_comes_back_under_another_split(world: int, tmp_path: Path) -> None:
    paths = run_ranks(_save_on_rank, world, tmp_path / "checkpoints", 200)
    assert paths == [tmp_path / "checkpoints" / "step-00000200"] * world
    for readers in (1, 2, 3, 4):
        assert differing_bytes(paths[0], made_up_state(200), seed=readers, world=readers) == 0
    assert verify_checkpoint(paths[0]) == ()
    assert sorted(p.name for p in paths[0].iterdir()) == [
        "manifest.json", "ranges.safetensors", *(f"rank-0000{r}.safetensors" for r in range(world)), "run_state.json"
    ]  # fmt: skip
    assert [p.name for p in paths[0].parent.iterdir()] == ["step-00000200"]


def test_counters_and_reference_come_back(tmp_path: Path) -> None:
    path = save(tmp_path, 7)
    with CheckpointReader(path) as reader:
        assert reader.step == 7
        assert reader.run_state == {"step": 7, "samples_seen": 56, "lr": 1e-5, "名": [1, None, True]}
        assert reader.manifest.samples_seen == 56
        assert reader.manifest.model == MODEL
        assert reader.kinds() == ("param", "exp_avg", "exp_avg_sq", "step")
        with pytest.raises(KeyError):
            reader.shape("block.weight", "exp_max")


def test_manifest_is_plain_json_that_leads_to_the_bytes(tmp_path: Path) -> None:
    path, state = save(tmp_path, 3), made_up_state(3)
    manifest = json.loads((path / "manifest.json").read_text())
    entry = next(t for t in manifest["tensors"] if t["name"] == "block.weight" and t["kind"] == "exp_avg")
    first = sum(t["ranges"] for t in manifest["tensors"][: manifest["tensors"].index(entry)])
    rows = {name: column[first : first + entry["ranges"]] for name, column in load_file(path / RANGES).items()}
    lengths = np.diff(rows["start"], append=37 * 53)
    parts = [
        np.fromfile(path / manifest["files"][file]["name"], "<f4", length, offset=offset)
        for file, offset, length in zip(rows["file"], rows["offset"], lengths, strict=True)
    ]
    assert np.array_equal(np.concatenate(parts).reshape(entry["shape"]), state["block.weight", "exp_avg"].numpy())


def test_rank_files_are_ordinary_safetensors(tmp_path: Path) -> None:
    path = save(tmp_path, 3)
    tensor = next(t for t in load_manifest(path).tensors if t.name == "block.bias" and t.kind == "param")
    with safe_open(path / "rank-00000.safetensors", "pt") as file:
        parts = [file.get_tensor(f"param:block.bias[{r.start}:{r.start + r.length}]") for r in tensor.ranges]
    assert torch.equal(torch.cat(parts), made_up_state(3)["block.bias", "param"])


def test_ranges_may_be_a_generator_and_live_in_strided_memory(tmp_path: Path) -> None:
    values = torch.arange(20.0).reshape(10, 2)[:, 1]
    path = save(tmp_path, 1, ranges=(FlatRange("w", "param", (10,), 5 * i, values[5 * i : 5 * i + 5]) for i in (0, 1)))
    with CheckpointReader(path) as reader:
        assert torch.equal(reader.read("w", 0, 10), values)


def test_large_ranges_are_written_in_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen_edit_zero.checkpoints.rank_file.CHUNK_BYTES", 64)
    path = save(tmp_path, 1)
    assert differing_bytes(path, made_up_state(1)) == 0
    assert verify_checkpoint(path) == ()
    with CheckpointReader(path) as reader:
        chunks = [chunk.copy() for chunk in reader.stream("block.weight", chunk_bytes=100)]
    assert max(map(len, chunks)) == 100
    assert np.array_equal(np.concatenate(chunks).view(np.float32), made_up_state(1)["block.weight", "param"].ravel())


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save(tmp_path, 5)
    other = made_up_state(99)
    again = save(tmp_path, 5, ranges=[FlatRange(n, k, tuple(t.shape), 0, t.reshape(-1)) for (n, k), t in other.items()])
    assert differing_bytes(again, other) == 0
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000005"]


def _save_with_hole(rank: int, world: int, folder: Path, length: int) -> str:
    values = torch.zeros(length if rank else 10)
    try:
        save(folder, 2, rank=rank, world=world, ranges=[FlatRange("w", "param", (20,), 10 * rank, values)])
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.mark.parametrize(
    ("length", "word"), [(9, "elements 19 to 19 are nowhere"), (11, "there are 21 elements, but its shape has 20")]
)
def test_ranks_that_do_not_cover_a_tensor_once_save_nothing(length: int, word: str, tmp_path: Path) -> None:
    said = run_ranks(_save_with_hole, 2, tmp_path, length)
    assert said[0] == said[1]
    assert "tensor w (param)" in said[0]
    assert word in said[0]
    assert list(tmp_path.iterdir()) == []


def _save_in_another_place(rank: int, world: int, folder: Path) -> str:
    import qwen_edit_zero.checkpoints.disk as disk

    disk.VISIBLE_WITHIN_SECONDS = 0.2
    try:
        save(folder / f"node{rank}", 2, rank=rank, world=world)
    except StorageError as error:
        return str(error)
    return "saved"


def test_a_folder_that_nodes_do_not_share_is_told_apart(tmp_path: Path) -> None:
    said = run_ranks(_save_in_another_place, 2, tmp_path)
    assert said[0] == said[1].replace("node1/step", "node0/step")
    assert "rank 1" in said[0]
    assert "file system that all nodes share" in said[0]
    assert latest_checkpoint(tmp_path / "node0").path is None
