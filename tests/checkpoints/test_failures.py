"""A save that fails or dies leaves what was there before, and nothing that counts."""

from __future__ import annotations

import errno
import os
import re
import resource
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from qwen_edit_zero.checkpoints import disk
from qwen_edit_zero.checkpoints.retention import Retention
from qwen_edit_zero.checkpoints.validity import latest_checkpoint, verify_checkpoint
from qwen_edit_zero.errors import QwenEditError, RunError, StorageError
from qwen_edit_zero.flat_state import FlatRange
from tests.checkpoints.states import differing_bytes, made_up_state, owned_ranges, save
from tests.ranks import run_ranks


def _message(call: Any, *args: Any, **kwargs: Any) -> str:
    try:
        call(*args, **kwargs)
    except QwenEditError as error:
        return f"{type(error).__name__}: {error}"
    return "saved"


def _save_with_small_file_limit(rank: int, world: int, folder: Path) -> str:
    written = save(folder, 1, rank=rank, world=world) / "rank-00001.safetensors"
    if rank == 1:
        most = written.stat().st_size - 100
        resource.setrlimit(resource.RLIMIT_FSIZE, (most, most))  # write(2) itself fails, near the end of the file
    return _message(save, folder, 2, rank=rank, world=world)


def test_a_write_error_on_one_rank_is_the_same_error_on_all(tmp_path: Path) -> None:
    said = run_ranks(_save_with_small_file_limit, 3, tmp_path)
    assert said[0] == said[1] == said[2]
    assert said[0].startswith("StorageError: ")
    assert "rank 1 on" in said[0]
    assert "File too large" in said[0]
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert differing_bytes(tmp_path / "step-00000001", made_up_state(1)) == 0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(place)], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip("mounting a small tmpfs needs root and CAP_SYS_ADMIN")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def _fill_disk_meanwhile(rank: int, world: int, folder: Path) -> str:
    save(folder, 1, rank=rank, world=world)
    calls = 0

    def ranges() -> Iterable[FlatRange]:
        nonlocal calls
        calls += 1
        for item in owned_ranges(made_up_state(2), rank, world, 0):
            if calls == 2 and rank == 0:
                with open(folder / "somebody-elses.bin", "ab", buffering=0) as file:
                    while True:
                        try:
                            file.write(bytes(4096))
                        except OSError:
                            break
            yield item

    return _message(save, folder, 2, rank=rank, world=world, ranges=ranges)


def test_a_disk_that_fills_up_while_saving(small_disk: Path) -> None:
    said = run_ranks(_fill_disk_meanwhile, 2, small_disk)
    assert said[0] == said[1]
    assert said[0].startswith("StorageError: ")
    assert "No space left on device" in said[0]
    assert sorted(p.name for p in small_disk.iterdir()) == ["somebody-elses.bin", "step-00000001"]
    assert differing_bytes(small_disk / "step-00000001", made_up_state(1)) == 0


def test_too_little_space_is_found_before_anything_is_written(small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(2 * 2**20 - 16384))
    with pytest.raises(StorageError, match=r"needs 3\d\.\d kB, and .* has .* free"):
        save(small_disk, 2)
    assert [p.name for p in small_disk.iterdir()] == ["other"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize(
    "name", ["rank-00000.safetensors", "rank-00000.ranges", "ranges.safetensors", "run_state.json", "manifest.json.tmp"]
)
def test_storage_that_fails_at_any_file_is_told_with_advice_and_leaves_nothing(
    number: int, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, 1)
    real = disk.ChecksummedFile.write

    def write(file: disk.ChecksummedFile, data: Any) -> None:
        if file.path.name == name:
            raise OSError(number, os.strerror(number), str(file.path))
        real(file, data)

    monkeypatch.setattr(disk.ChecksummedFile, "write", write)
    with pytest.raises(StorageError) as caught:
        save(tmp_path, 2)
    place = rf"{re.escape(str(tmp_path))}/\.step-00000002\.[0-9a-f]{{8}}\.partial/{re.escape(name)}"
    assert re.search(rf"{os.strerror(number)} \({place}\); ", str(caught.value))
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000001"]
    assert differing_bytes(tmp_path / "step-00000001", made_up_state(1)) == 0


def test_a_file_system_that_turns_read_only(small_disk: Path) -> None:
    save(small_disk, 1)
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(StorageError, match=r"Read-only file system .*; the file system is read-only now"):
        save(small_disk, 2)
    assert differing_bytes(small_disk / "step-00000001", made_up_state(1)) == 0


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(StorageError, match="checkpoints"):
        save(tmp_path / "checkpoints", 2)
    assert (tmp_path / "checkpoints").read_text() == "a file"


def test_a_bug_while_streaming_leaves_nothing(tmp_path: Path) -> None:
    calls = 0

    def ranges() -> Iterable[FlatRange]:
        nonlocal calls
        calls += 1
        yield from owned_ranges(made_up_state(2), 0, 1, 0)
        if calls == 2:
            raise RuntimeError("device lost")

    with pytest.raises(RunError, match="RuntimeError: device lost"):
        save(tmp_path, 2, ranges=ranges)
    assert list(tmp_path.iterdir()) == []


def _die_while_streaming(rank: int, world: int, folder: Path) -> None:
    save(folder, 1, rank=rank, world=world)
    calls = 0

    def ranges() -> Iterable[FlatRange]:
        nonlocal calls
        calls += 1
        for i, item in enumerate(owned_ranges(made_up_state(2), rank, world, 0)):
            if calls == 2 and rank == 1 and i == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

    save(folder, 2, rank=rank, world=world, ranges=ranges)


def test_a_killed_rank_leaves_nothing_that_counts(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"rank \d (died|failed)"):
        run_ranks(_die_while_streaming, 2, tmp_path)
    assert latest_checkpoint(tmp_path).path == tmp_path / "step-00000001"
    assert len(list(tmp_path.glob(".step-00000002.*.partial"))) == 1
    save(tmp_path, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    assert differing_bytes(tmp_path / "step-00000002", made_up_state(2)) == 0


def _save_and_die_at(event_number: int, folder: Path, step: int, state_step: int) -> int:
    """Exit status of a process that saves and is killed at its n-th change of the file system."""
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            nonlocal count
            opened_to_write = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_WRONLY
            if opened_to_write or event in ("os.rename", "os.remove", "os.rmdir", "os.mkdir"):
                count += 1
                if count == event_number:
                    os.kill(os.getpid(), signal.SIGKILL)

        state = made_up_state(state_step)
        sys.addaudithook(hook)
        try:
            save(folder, step, ranges=lambda: owned_ranges(state, 0, 1, 0), retention=Retention(keep=1))
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def _kill_everywhere(rank: int, world: int, folder: Path, step: int, state_step: int) -> list[str]:
    """Kill a save, which follows a whole one of step 1, at each of its changes of the file system in turn."""
    outcomes = []
    for number in range(1, 1000):
        place = folder / f"{number}"
        save(place, 1)
        status = _save_and_die_at(number, place, step, state_step)
        path = latest_checkpoint(place).path
        assert path is not None, f"killed at change {number}: no checkpoint is left"
        assert verify_checkpoint(path) == ()
        is_new = differing_bytes(path, made_up_state(state_step)) == 0
        assert is_new or differing_bytes(path, made_up_state(1)) == 0
        save(place, 3, retention=Retention(keep=1))
        assert [p.name for p in place.iterdir()] == ["step-00000003"], f"killed at change {number}: leftovers"
        if status == 0:
            assert is_new
            return outcomes
        outcomes.append("new" if is_new else "old")
    raise AssertionError("the save never ended by itself")


@pytest.mark.parametrize(("step", "state_step"), [(2, 2), (1, 9)], ids=["next step", "same step again"])
def test_killed_at_any_change_of_the_file_system_old_or_new_is_whole(
    step: int, state_step: int, tmp_path: Path
) -> None:
    (outcomes,) = run_ranks(_kill_everywhere, 1, tmp_path, step, state_step, init_process_group=False)
    assert outcomes == sorted(outcomes, reverse=True)  # old ... old new ... new
    assert {"old", "new"} == set(outcomes)
