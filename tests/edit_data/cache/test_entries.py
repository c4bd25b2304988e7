"""Entries on disk: what is put comes back bit for bit, what is damaged never does, a kill costs nothing whole."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from qwen_edit_zero.edit_data.cache import entries as entries_module
from qwen_edit_zero.edit_data.cache import locks
from qwen_edit_zero.edit_data.cache.entries import Entries, EntryKind
from qwen_edit_zero.edit_data.cache.ranks import Ranks
from qwen_edit_zero.edit_data.cache.shard import SUFFIX, ShardWriter, adopt, read_records
from qwen_edit_zero.edit_data.cache.sorted_table import as_keys
from qwen_edit_zero.errors import DataError

KIND = EntryKind("latent", "ab" * 16, {"vae": "x"})


def key(number: int) -> bytes:
    return number.to_bytes(4, "big") * 4


def tensor(number: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(16, 4, 6, generator=torch.Generator().manual_seed(number)).to(dtype)


def opened(folder: Path, *, alone: bool = False) -> Entries:
    found = Entries(folder, KIND)
    found.refresh(Ranks(), alone=alone)
    return found


def fill(folder: Path, numbers: range, shard_bytes: int = 3000) -> None:
    with Entries(folder, KIND).writer(shard_bytes) as writer:
        for i in numbers:
            writer.put(key(i), tensor(i))


def have(found: Entries, numbers: range) -> list[int]:
    missing = found.missing(as_keys(np.frombuffer(b"".join(map(key, numbers)), np.uint8).reshape(-1, 16)))
    return [i for i, m in zip(numbers, missing, strict=True) if not m]


def files(folder: Path, suffix: str) -> list[Path]:
    return sorted((folder / KIND.folder_name / "shards").glob(f"*{suffix}"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_what_is_put_comes_back_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    wide = torch.randn(1000, 8).to(dtype)
    with Entries(tmp_path, KIND).writer() as writer:
        writer.put(key(1), tensor(1, dtype))
        writer.put(key(2), wide[3:6])  # a view of something larger
        writer.put(key(3), tensor(3, dtype).transpose(0, 2))
    found = opened(tmp_path)
    for number, expected in ((1, tensor(1, dtype)), (2, wide[3:6]), (3, tensor(3, dtype).transpose(0, 2))):
        got = found.get(key(number))
        assert got.dtype == dtype
        assert torch.equal(got, expected)
    with pytest.raises(DataError, match="no entry"):
        found.get(key(4))


def test_shards_are_of_bounded_size_and_plain_safetensors_files(tmp_path: Path) -> None:
    fill(tmp_path, range(20))
    shards = files(tmp_path, SUFFIX)
    assert len(shards) == 5
    with safe_open(shards[0], "pt") as file:
        for name in file.keys():  # noqa: SIM118
            assert torch.equal(file.get_tensor(name), tensor(int(name[:8], 16)))
    assert have(opened(tmp_path), range(25)) == list(range(20))


def test_an_index_grows_with_the_shards_and_is_made_again_from_their_headers(tmp_path: Path) -> None:
    fill(tmp_path, range(6))
    assert len(opened(tmp_path)) == 6
    fill(tmp_path, range(4, 10))
    both = opened(tmp_path, alone=True)
    assert len(both) == 10, "an entry that is there twice counts once"
    assert len(list((both.folder / "index").iterdir())) == 1, "who is alone deletes indexes that are not used any more"
    for file in files(tmp_path, ".index"):
        file.unlink()
    fill(tmp_path, range(10, 11))
    for folder in (both.folder / "index").iterdir():
        for file in folder.iterdir():
            file.unlink()
    assert have(opened(tmp_path), range(12)) == list(range(11))


@pytest.mark.parametrize("name", ["high.npy", "rest.npy", "shards.json"])
@pytest.mark.parametrize("size", [0, 10, 150])
def test_an_index_that_a_crash_of_the_node_left_half_written_is_made_again(
    tmp_path: Path, name: str, size: int
) -> None:
    fill(tmp_path, range(12))
    (index,) = (opened(tmp_path).folder / "index").iterdir()
    os.truncate(index / name, min(size, (index / name).stat().st_size - 1))
    assert have(opened(tmp_path), range(14)) == list(range(12))
    os.truncate(index / name, 0)
    fill(tmp_path, range(12, 14))  # now the damaged one would be what the new one is made of
    assert have(opened(tmp_path), range(14)) == list(range(14))


@pytest.mark.parametrize("damage", ["flip", "cut", "gone"])
def test_damage_is_found_and_only_what_is_damaged_is_missing_afterwards(tmp_path: Path, damage: str) -> None:
    fill(tmp_path, range(9))
    shard = files(tmp_path, SUFFIX)[1]
    records = read_records(shard)
    lost = sorted(int.from_bytes(bytes(r["key"][:4]), "big") for r in records)
    victim = records[-1]["key"].tobytes()
    before = opened(tmp_path)
    if damage == "flip":
        data = bytearray(shard.read_bytes())
        data[-5] ^= 1
        shard.write_bytes(data)
        lost = [int.from_bytes(victim[:4], "big")]
    elif damage == "cut":
        os.truncate(shard, shard.stat().st_size - 100)
        lost = [int.from_bytes(victim[:4], "big")]
    else:
        shard.unlink()
    with pytest.raises(DataError, match=r"struck out|cannot be read"):
        before.get(victim)
    assert have(opened(tmp_path), range(9)) == [i for i in range(9) if i not in lost]
    fill(tmp_path, range(9))
    assert torch.equal(opened(tmp_path).get(victim), tensor(int.from_bytes(victim[:4], "big")))


def test_values_are_compared_once_a_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, range(3))
    found = opened(tmp_path)
    compared: list[int] = []
    real = entries_module.checksum
    monkeypatch.setattr(entries_module, "checksum", lambda data: compared.append(len(data)) or real(data))
    for _ in range(3):
        found.get(key(1))
    assert len(compared) == 1


def _write_until_killed(folder: Path, pipe: object) -> None:
    with Entries(folder, KIND).writer() as writer:
        for i in range(1000):
            writer.put(key(i), tensor(i))
            pipe.send(i)  # type: ignore[attr-defined]
            time.sleep(0.01)


def killed_writer(folder: Path, after: int) -> None:
    """A process that writes entries and is killed when `after` are written."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_write_until_killed, args=(folder, sender))
    process.start()
    sender.close()
    while receiver.recv() < after - 1:
        pass
    os.kill(process.pid or 0, signal.SIGKILL)
    process.join()


def test_a_killed_writer_loses_nothing_that_was_whole(tmp_path: Path) -> None:
    killed_writer(tmp_path, 7)
    assert not files(tmp_path, SUFFIX)
    found = opened(tmp_path)
    assert len(have(found, range(20))) >= 7
    assert all(torch.equal(found.get(key(i)), tensor(i)) for i in range(7))
    assert not files(tmp_path, ".partial")
    assert not files(tmp_path, ".journal")


@pytest.mark.parametrize("damage", ["torn journal", "torn entry", "changed", "no journal"])
def test_of_a_partial_shard_only_whole_entries_are_saved(tmp_path: Path, damage: str) -> None:
    killed_writer(tmp_path, 5)
    (partial,) = files(tmp_path, ".partial")
    (journal,) = files(tmp_path, ".journal")
    size = 16 * 4 * 6 * 2
    count = journal.stat().st_size // 64
    if damage == "torn journal":
        os.truncate(journal, journal.stat().st_size - 9)
        expected = range(count - 1)
    elif damage == "torn entry":
        os.truncate(partial, partial.stat().st_size - size - 3)
        expected = range(count - 2)
    elif damage == "changed":
        data = bytearray(partial.read_bytes())
        data[256 * 1024 + 2 * size + 5] ^= 1  # of the third entry
        partial.write_bytes(data)
        expected = range(2)
    else:
        journal.unlink()
        expected = range(0)
    assert have(opened(tmp_path), range(20)) == list(expected)
    assert not files(tmp_path, ".partial")


def test_a_shard_that_is_being_written_is_left_to_its_writer(tmp_path: Path) -> None:
    with ShardWriter(tmp_path) as writer:
        writer.put(key(1), tensor(1))
        (partial,) = tmp_path.glob("*.partial")
        assert adopt(partial) == 0
        writer.put(key(2), tensor(2))
    (shard,) = tmp_path.glob("*.safetensors")
    assert len(read_records(shard)) == 2


def test_several_processes_may_write_to_one_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=fill, args=(tmp_path, range(i, i + 8))) for i in (0, 4, 8)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    found = opened(tmp_path)
    assert have(found, range(20)) == list(range(16))
    assert all(torch.equal(found.get(key(i)), tensor(i)) for i in range(16))


def test_a_shard_that_is_taken_for_abandoned_before_it_is_locked_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, taken = locks.try_lock, []

    def late(fd: int) -> locks.Got:
        if not taken:  # another job starts between the making of the file and its lock
            taken.extend(files(tmp_path, ".partial"))
            adopt(taken[0])
        return real(fd)

    monkeypatch.setattr(locks, "try_lock", late)
    fill(tmp_path, range(3))
    assert len(taken) == 1
    assert have(opened(tmp_path), range(3)) == [0, 1, 2]
