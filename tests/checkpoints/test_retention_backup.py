"""What is deleted, what stays, and the second copy."""

from __future__ import annotations

import io
import os
import threading
import time
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from fsspec.implementations.memory import MemoryFileSystem

from qwen_edit_zero.checkpoints import backup, retention
from qwen_edit_zero.checkpoints.backup import backup_checkpoint, backup_of_run, open_backup
from qwen_edit_zero.checkpoints.describe import list_checkpoints, show_checkpoint, verify_text
from qwen_edit_zero.checkpoints.disk import checksum_of
from qwen_edit_zero.checkpoints.manifest import load_head
from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.checkpoints.retention import Retention, prune
from qwen_edit_zero.checkpoints.validity import check_checkpoint, verify_checkpoint
from qwen_edit_zero.errors import CheckpointError, SettingsError, StorageError
from qwen_edit_zero.flat_state import FlatRange
from tests.checkpoints.states import differing_bytes, made_up_state, owned_ranges, save
from tests.ranks import run_ranks


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


def test_later_steps_than_the_one_just_written_are_not_touched(tmp_path: Path) -> None:
    for step in (20, 30, 100, 200):
        save(tmp_path, step)
    save(tmp_path, 50, retention=Retention(keep=2))
    assert _names(tmp_path) == [f"step-{step:08d}" for step in (30, 50, 100, 200)]
    assert prune(tmp_path, Retention(keep=1), newest=tmp_path / "step-00000100") == [
        tmp_path / "step-00000050", tmp_path / "step-00000030"
    ]  # fmt: skip


def test_every_nth_and_the_best_stay_beside_the_newest(tmp_path: Path) -> None:
    losses = {10: 5.0, 20: 1.0, 30: None, 40: 2.0, 50: 2.0, 60: 9.0}
    for step, loss in losses.items():
        save(tmp_path, step, metrics={} if loss is None else {"loss": loss})
    assert [p.name for p in prune(tmp_path, Retention(keep=1, every=30, best=2))] == ["step-00000040", "step-00000010"]
    assert _names(tmp_path) == [f"step-000000{step}" for step in (20, 30, 50, 60)]


def test_a_damaged_one_is_not_among_the_best(tmp_path: Path) -> None:
    for step, loss in ((1, 1.0), (2, 2.0), (3, 3.0)):
        save(tmp_path, step, metrics={"loss": loss})
    (tmp_path / "step-00000001" / "rank-00000.safetensors").unlink()
    assert prune(tmp_path, Retention(keep=1, best=1)) == []
    assert _names(tmp_path) == ["step-00000001", "step-00000002", "step-00000003"]


def test_each_checkpoint_is_looked_at_once_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 9):
        save(tmp_path, step, metrics={"loss": float(step)})
    looked: list[str] = []

    def look(path: Path) -> Any:
        looked.append(path.name)
        return check_checkpoint(path)

    monkeypatch.setattr(retention, "check_checkpoint", look)
    gone = prune(tmp_path, Retention(keep=2, every=5, best=2))
    assert [p.name[-1] for p in gone] == ["6", "4", "3"]
    assert len(looked) == len(set(looked)) == 8


def _read_meanwhile(rank: int, world: int, path: Path, begun: Any, over: Any) -> None:
    with CheckpointReader(path):
        begun.touch()
        while not over.exists():
            time.sleep(0.01)


def test_what_another_process_reads_goes_only_when_it_has_been_read(tmp_path: Path) -> None:
    folder, begun, over = tmp_path / "checkpoints", tmp_path / "begun", tmp_path / "over"
    oldest = save(folder, 1)
    for step in (2, 3):
        save(folder, step)
    reading = threading.Thread(
        target=run_ranks, args=(_read_meanwhile, 1, oldest, begun, over), kwargs={"init_process_group": False}
    )
    reading.start()
    while not begun.exists():
        time.sleep(0.01)
    assert [p.name for p in prune(folder, Retention(keep=1))] == ["step-00000002"]
    over.touch()
    reading.join()
    assert prune(folder, Retention(keep=1)) == [oldest]


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
    with pytest.raises(CheckpointError, match=r"rank-00000\.safetensors is damaged"):
        backup_checkpoint(path, tmp_path / "backup")
    assert _names(tmp_path / "backup") == []


class _Bucket(MemoryFileSystem):  # type: ignore[misc]
    """An object store: there are no folders, only names with slashes."""

    protocol = "bucket"

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(path.replace(f"{cls.protocol}://", "memory://")))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        pass


class _Forgetful(_Bucket):
    """One that loses the end of large objects."""

    protocol = "forgetful"
    store: dict[str, Any] = {}
    pseudo_dirs = [""]

    def _open(self, path: str, mode: str = "rb", **more: Any) -> Any:
        file = super()._open(path, mode, **more)
        if mode == "rb" and path.endswith("rank-00000.safetensors"):
            return io.BytesIO(file.read()[:-1] + b"?")
        return file


def _from_memory(root: str, folder: Path) -> Path:
    MemoryFileSystem().get(root, str(folder), recursive=True)
    return folder


def test_backup_to_an_object_store_comes_back_bit_for_bit(tmp_path: Path) -> None:
    fsspec.register_implementation("bucket", _Bucket, clobber=True)
    place = open_backup("bucket://bucket/run")
    path = save(tmp_path / "run", 4)
    assert place.copy(path) == "bucket://bucket/run/step-00000004"
    assert place.copy(path) == "bucket://bucket/run/step-00000004"
    back = _from_memory("/bucket/run/step-00000004", tmp_path / "step-00000004")
    assert differing_bytes(back, made_up_state(4)) == 0
    assert verify_checkpoint(back) == ()


def test_another_save_of_the_step_sets_the_earlier_copy_aside(tmp_path: Path) -> None:
    place = open_backup("memory://bucket", "again")
    runs = [save(tmp_path / "one", 4, ranges=lambda: owned_ranges(made_up_state(8), 0, 1, 0)), save(tmp_path / "o", 4)]
    aside = f"replaced-{load_head(runs[0]).save_id[:8]}/step-00000004"
    for path in runs:
        assert place.copy(path) == "memory://bucket/again/step-00000004"
    assert place.copy(runs[0]) == f"memory://bucket/again/{aside}"
    back = _from_memory("/bucket/again/step-00000004", tmp_path / "back" / "step-00000004")
    assert differing_bytes(back, made_up_state(4)) == 0
    earlier = _from_memory(f"/bucket/again/{aside}", tmp_path / "earlier" / "step-00000004")
    assert differing_bytes(earlier, made_up_state(8)) == 0
    assert verify_checkpoint(earlier) == ()


def test_in_a_folder_too(tmp_path: Path) -> None:
    place = tmp_path / "backup"
    runs = [save(tmp_path / "one", 4, ranges=lambda: owned_ranges(made_up_state(8), 0, 1, 0)), save(tmp_path / "o", 4)]
    aside = place / f"replaced-{load_head(runs[0]).save_id[:8]}" / "step-00000004"
    for path in runs:
        assert backup_checkpoint(path, place) == place / "step-00000004"
    assert backup_checkpoint(runs[0], place) == aside
    assert differing_bytes(place / "step-00000004", made_up_state(4)) == 0
    assert differing_bytes(aside, made_up_state(8)) == 0


def test_a_damaged_copy_is_replaced(tmp_path: Path) -> None:
    place, path = tmp_path / "backup", save(tmp_path / "run", 4)
    (backup_checkpoint(path, place) / "rank-00000.safetensors").unlink()
    backup_checkpoint(path, place)
    assert _names(place) == ["step-00000004"]
    assert verify_checkpoint(place / "step-00000004") == ()


def test_runs_that_share_a_backup_have_a_folder_each(tmp_path: Path) -> None:
    fsspec.register_implementation("bucket", _Bucket, clobber=True)
    for run in ("one", "other"):
        folder = tmp_path / "runs" / run / "checkpoints"
        path = save(folder, 4)
        assert backup_of_run(str(tmp_path / "b"), folder).copy(path) == str(tmp_path / "b" / run / "step-00000004")
        assert backup_of_run("bucket://b", folder).copy(path) == f"bucket://b/{run}/step-00000004"


@pytest.mark.parametrize(
    ("given", "how"),
    [
        ("{run}/checkpoints", "is"),
        ("{run}/checkpoints/copies", "lies in"),
        ("{run}", "contains"),
        ("file://{run}/checkpoints", "is"),
        ("local://{run}/checkpoints", "is"),
        ("{run}/../link", "is"),
        ("{run}/x/../checkpoints", "is"),
    ],
)
def test_a_backup_in_the_place_of_the_checkpoints_is_refused(given: str, how: str, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "demo"
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "link").symlink_to(run / "checkpoints")
    with pytest.raises(SettingsError, match=f"{how} {run}/checkpoints, where the checkpoints themselves are"):
        backup_of_run(given.format(run=run), run / "checkpoints")


def test_a_file_url_of_another_machine_is_refused() -> None:
    with pytest.raises(SettingsError, match="names the host backups, but file:// is for this machine"):
        open_backup("file://backups/runs")


@pytest.mark.parametrize("url", ["memory://", "memory://b/runs", "dir::memory://b"])
def test_so_is_the_memory_of_the_process(url: str, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="is the memory of this process, which ends with it"):
        backup_of_run(url, tmp_path / "run" / "checkpoints")


def test_a_backup_folder_that_has_gone_is_not_made_anew(tmp_path: Path) -> None:
    path = save(tmp_path / "run", 4)
    for name in ("found", "made"):
        (tmp_path / name / ("demo" if name == "found" else "")).mkdir(parents=True)
        place = open_backup(str(tmp_path / name), "demo")
        if name == "made":
            place.copy(path)
        (tmp_path / name).rename(tmp_path / f"{name}-unmounted")
        (tmp_path / name).mkdir()  # the mount point that is left
        with pytest.raises(StorageError, match=r"demo is no longer there: .*not mounted any more"):
            place.copy(path)
        assert _names(tmp_path / name) == []


def test_so_is_a_roundabout_name_for_a_folder(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=f"is on this machine; give its folder, {tmp_path}, without a URL"):
        open_backup(f"dir::file://{tmp_path}")


class _ReadOnly(_Bucket):
    """One that may be read alone."""

    protocol = "readonly"

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **more: Any) -> None:
        raise PermissionError("Access Denied")


def test_a_probe_leaves_nothing_and_finds_what_takes_no_files(tmp_path: Path) -> None:
    fsspec.register_implementation("readonly", _ReadOnly, clobber=True)
    (tmp_path / "file").touch()
    for good in (str(tmp_path / "new" / "one"), "memory://probed"):
        open_backup(good, "demo").probe()
    assert _names(tmp_path / "new" / "one" / "demo") == []
    assert MemoryFileSystem().find("/probed") == []
    for bad, why in ((str(tmp_path / "file"), "exists|Not a directory"), ("readonly://bucket", "Access Denied")):
        with pytest.raises(SettingsError, match=f"could not be written to .*{why}"):
            open_backup(bad, "demo").probe()


def test_what_was_written_to_a_disk_is_read_back_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[tuple[str, str]] = []

    def forget(fd: int, offset: int, length: int, advice: int) -> None:
        assert (offset, length, advice) == (0, 0, os.POSIX_FADV_DONTNEED)
        events.append(("forgotten", os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))

    def read(path: Path) -> str:
        events.append(("read", path.name))
        return checksum_of(path)

    monkeypatch.setattr(os, "posix_fadvise", forget)
    monkeypatch.setattr(backup, "checksum_of", read)
    path = save(tmp_path / "run", 4)
    backup_checkpoint(path, tmp_path / "backup")
    for record in load_head(path).files:
        mine = [event for event, name in events if name == record.name]
        assert mine == ["forgotten", "read", "forgotten"]


def test_a_copy_that_reads_back_differently_is_no_checkpoint(tmp_path: Path) -> None:
    fsspec.register_implementation("forgetful", _Forgetful, clobber=True)
    path = save(tmp_path / "run", 4)
    with pytest.raises(StorageError, match=r"rank-00000\.safetensors in .* reads back differently"):
        open_backup("forgetful://bucket/run").copy(path)
    assert not _Forgetful().exists("/bucket/run/step-00000004/manifest.json")


def test_a_file_url_is_a_folder(tmp_path: Path) -> None:
    path = save(tmp_path / "run", 4)
    assert open_backup(f"file://{tmp_path}/the%20copy").copy(path) == str(tmp_path / "the copy" / "step-00000004")
    assert verify_checkpoint(tmp_path / "the copy" / "step-00000004") == ()


def test_kinds_of_any_name_travel(tmp_path: Path) -> None:
    average = torch.arange(6.0)
    ranges = [FlatRange("w", kind, (2, 3), 0, average + i) for i, kind in enumerate(("param", "ema", "state1"))]
    ranges.append(FlatRange("w", "absmax", (3,), 0, torch.ones(3, dtype=torch.uint8)))
    with CheckpointReader(save(tmp_path, 1, ranges=ranges)) as reader:
        assert reader.kinds() == ("param", "ema", "state1", "absmax")
        assert torch.equal(reader.read("w", 1, 4, "ema"), average[1:5] + 1)
        assert reader.dtype("w", "absmax") == "U8"


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
