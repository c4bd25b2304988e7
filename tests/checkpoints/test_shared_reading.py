"""Ranks that load a checkpoint together read each byte once or nearly, and none goes on if any byte is damaged."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qwen_edit_zero.checkpoints.manifest import load_manifest
from qwen_edit_zero.checkpoints.reader import DamagedError
from qwen_edit_zero.checkpoints.shared_reading import opened_together, share
from qwen_edit_zero.checkpoints.writer import save_checkpoint
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.safetensors_file import ITEM_SIZE
from qwen_edit_zero.training.loading import check_whole, load_checkpoint
from tests.checkpoints.states import MODEL, save
from tests.engines import harness, problem
from tests.engines.harness import MemorySource
from tests.ranks import run_ranks

CPU = torch.device("cpu")


def _built(kind: str) -> Any:
    return harness.build(kind, MemorySource.of_weights(problem.weights_of(problem.make_model())))


def _save(rank: int, world: int, kind: str, folder: Path) -> None:
    """The checkpoints of two steps."""
    engine = _built(kind)
    for step in (1, 2):
        problem.train_with(engine, micro=2, steps=range(step - 1, step))
        save_checkpoint(
            folder, step=step, ranges=engine.local_state, run_state={"engine": engine.scalars()}, settings={},
            model=MODEL, engine=engine.name,
        )  # fmt: skip
    engine.close()


class CountedReads:
    """Bytes and opened data files of this process while it holds."""

    def __init__(self) -> None:
        self.bytes, self.files = 0, set[str]()

    def __enter__(self) -> CountedReads:
        self._preadv, self._open = os.preadv, os.open

        def preadv(fd: int, *arguments: Any) -> int:
            count = self._preadv(fd, *arguments)
            self.bytes += count
            self.files.add(Path(os.readlink(f"/proc/self/fd/{fd}")).name)
            return count

        os.preadv = preadv  # type: ignore[assignment]
        return self

    def __exit__(self, *_: object) -> None:
        os.preadv = self._preadv


def _load(rank: int, world: int, kind: str, path: Path) -> tuple[int, set[str], bytes]:
    engine = _built(kind)
    with CountedReads() as counted, opened_together(path) as reader:
        load_checkpoint(engine, reader, lambda _: None)
    state = harness.whole_state(engine)
    engine.close()
    return counted.bytes, counted.files, harness.packed(state if rank == 0 else None)


def _data_bytes(path: Path) -> int:
    return sum(int(t.ranges.byte_sizes(ITEM_SIZE[t.dtype]).sum()) for t in load_manifest(path).tensors)


@pytest.mark.parametrize("kind", ["fsdp2", "zero2", "zero3"])
def test_on_as_many_ranks_each_reads_its_own_file_once(kind: str, tmp_path: Path) -> None:
    run_ranks(_save, 2, kind, tmp_path)
    path = tmp_path / "step-00000002"
    read = run_ranks(_load, 2, kind, path)
    assert sum(count for count, *_ in read) == pytest.approx(_data_bytes(path), abs=100)  # the 0-d one is everywhere
    assert [files for _, files, _ in read] == [
        {"rank-00000.safetensors"},
        {"rank-00001.safetensors"},
    ] or kind == "fsdp2"
    for rank, (count, *_) in enumerate(read):
        assert count <= (path / f"rank-{rank:05d}.safetensors").stat().st_size


@pytest.mark.parametrize(("writer", "written", "kind", "world"), [("fsdp2", 2, "zero3", 3), ("zero2", 3, "fsdp2", 2)])
def test_on_another_number_of_ranks_no_byte_is_read_more_than_twice(
    writer: str, written: int, kind: str, world: int, tmp_path: Path
) -> None:
    run_ranks(_save, written, writer, tmp_path)
    path = tmp_path / "step-00000002"
    read = run_ranks(_load, world, kind, path)
    data = _data_bytes(path)
    assert data < sum(count for count, *_ in read) <= 2 * data + 100
    assert max(count for count, *_ in read) < 1.5 * 2 * data / world


def _after_damage(rank: int, world: int, kind: str, folder: Path) -> tuple[str, bytes]:
    """Load the newest, which is damaged, then the older one into the same engine."""
    engine = _built(kind)
    with pytest.raises(DamagedError) as caught, opened_together(folder / "step-00000002") as reader:
        load_checkpoint(engine, reader, lambda _: None)
    with opened_together(folder / "step-00000001") as reader:
        load_checkpoint(engine, reader, lambda _: None)
    state = harness.whole_state(engine)
    problem.train_with(engine, micro=2, steps=range(1, 2))  # no rank is left behind in a collective
    engine.close()
    return str(caught.value), harness.packed(state if rank == 0 else None)


@pytest.mark.parametrize(
    ("kind", "world"),
    [("zero3", 2), ("fsdp2", 3)]
    + [pytest.param(kind, n, marks=pytest.mark.slow) for kind, n in (("zero3", 1), ("zero3", 3), ("fsdp2", 1))],
)
def test_damage_is_refused_by_all_ranks_with_the_same_words_and_an_older_one_loads(
    kind: str, world: int, tmp_path: Path
) -> None:
    run_ranks(_save, 2, "zero3", tmp_path)
    undamaged = harness.unpacked(run_ranks(_load, 1, "ddp", tmp_path / "step-00000001")[0][2])
    path = tmp_path / "step-00000002"
    tensor = next(t for t in load_manifest(path).tensors if (t.name, t.kind) == ("before.weight", "exp_avg_sq"))
    file = path / load_manifest(path).files[tensor.ranges[1].file].name
    content = bytearray(file.read_bytes())
    content[tensor.ranges[1].offset + 1] ^= 4
    file.write_bytes(content)
    results = run_ranks(_after_damage, world, kind, tmp_path)
    assert len({said for said, _ in results}) == 1
    said = results[0][0]
    assert f"{file} is damaged: before.weight (exp_avg_sq), elements {tensor.ranges[1].start} to" in said
    assert harness.unpacked(results[0][1]) == undamaged


def test_a_file_that_ends_early_is_refused_too(tmp_path: Path) -> None:
    run_ranks(_save, 2, "fsdp2", tmp_path)
    file = tmp_path / "step-00000002" / "rank-00001.safetensors"
    os.truncate(file, file.stat().st_size // 2)
    said = {said for said, _ in run_ranks(_after_damage, 2, "fsdp2", tmp_path)}
    assert len(said) == 1
    assert f"cannot read {file}: the file ends at byte" in said.pop()


def _check(rank: int, world: int, path: Path) -> tuple[str, int]:
    with CountedReads() as counted:
        try:
            with opened_together(path) as reader:
                check_whole(reader, CPU, lambda _: None)
        except CheckpointError as error:
            return str(error), counted.bytes
    return "", counted.bytes


def test_any_damaged_range_is_found_by_ranks_that_read_for_the_checksums_alone(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    whole = run_ranks(_check, 3, path)
    assert [said for said, _ in whole] == [""] * 3
    assert sum(count for _, count in whole) == _data_bytes(path)
    file = path / "rank-00000.safetensors"
    content = file.read_bytes()
    for tensor in load_manifest(path).tensors[::3]:
        for stored in tensor.ranges:
            damaged = bytearray(content)
            damaged[stored.offset] ^= 1
            file.write_bytes(damaged)
            said, _ = _check(0, 1, path)
            assert f"{tensor.name} ({tensor.kind}), elements {stored.start} to" in said


@pytest.mark.parametrize("world", [1, 2, 5, 64])
def test_what_is_left_is_dealt_out_once_and_evenly(world: int, tmp_path: Path) -> None:
    manifest = load_manifest(save(tmp_path, 1))
    size = np.concatenate([t.ranges.byte_sizes(ITEM_SIZE[t.dtype]) for t in manifest.tensors])
    wanted = np.random.default_rng(0).random(len(size)) < 0.7
    shares = [share(manifest, wanted, rank, world) for rank in range(world)]
    assert sorted(np.concatenate(shares)) == list(np.flatnonzero(wanted))
    most = max(int(size[rows].sum()) for rows in shares)
    assert most <= size[wanted].sum() / world + size.max()


def _counters_edited_for_one_rank(rank: int, world: int, path: Path) -> str:
    if rank == 1:  # as if a file system showed it other bytes
        import qwen_edit_zero.checkpoints.layout as layout

        layout.RUN_STATE = "manifest.json"
    with pytest.raises(DamagedError) as caught, opened_together(path):
        pass
    return str(caught.value)


def test_what_one_rank_cannot_open_no_rank_opens(tmp_path: Path) -> None:
    said = run_ranks(_counters_edited_for_one_rank, 2, save(tmp_path, 1))
    assert said[0] == said[1]
    assert "rank 1 on " in said[0]
    assert "is damaged or was edited" in said[0]
