"""Checkpoints written while training goes on: the same bytes, one at a time, and no failure unheard."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qwen_edit_zero.checkpoints import disk, placement, snapshot, writer
from qwen_edit_zero.checkpoints.manifest import load_head
from qwen_edit_zero.checkpoints.validity import latest_checkpoint, verify_checkpoint
from qwen_edit_zero.checkpoints.writer import Contents
from qwen_edit_zero.errors import QwenEditError, SettingsError, StorageError
from qwen_edit_zero.flat_state import FlatRange
from qwen_edit_zero.settings.models import CheckpointSettings
from qwen_edit_zero.training import backups, saving
from qwen_edit_zero.training.backups import catch_up_backup, probe_backup
from qwen_edit_zero.training.metrics import StepMetrics
from qwen_edit_zero.training.saving import CheckpointHook
from tests.checkpoints.states import MODEL, differing_bytes, made_up_state, owned_ranges
from tests.ranks import run_ranks


class ChangingEngine:
    """Holds `made_up_state(step)` in the same memory at every step, as an optimizer does."""

    name, device = "changing", torch.device("cpu")

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world, self.state = rank, world, made_up_state(0)

    def train(self, step: int) -> None:
        for key, value in made_up_state(step).items():
            self.state[key].copy_(value)

    def local_state(self) -> Iterator[FlatRange]:
        return owned_ranges(self.state, self.rank, self.world, 0)


class Run:
    """A run of made-up steps on one rank; `said` is what its user saw."""

    def __init__(self, folder: Path, rank: int = 0, world: int = 1, **settings: Any) -> None:
        self.said: list[str] = []
        self.engine: Any = ChangingEngine(rank, world)
        self.step = 0
        chosen = CheckpointSettings(**({"every": 1, "keep": None, "asynchronous": True} | settings))
        self.hook = CheckpointHook(self.engine, folder, chosen, self._describe, self.said.append)

    def _describe(self, metrics: StepMetrics, recorded: Mapping[str, float]) -> Contents:
        state = {"step": metrics.step, "samples_seen": metrics.samples_seen}
        return Contents(metrics.step, state, {}, MODEL, self.engine.name, recorded)

    def train(self, steps: int = 1, *, last: bool = False, loss: float = 1.0) -> None:
        for i in range(steps):
            self.step += 1
            self.engine.train(self.step)
            metrics: Any = SimpleNamespace(step=self.step, loss=loss, skipped=False, samples_seen=8 * self.step)
            self.hook.after_step(metrics, is_last=last and i == steps - 1)


class Gate:
    """Holds up the writing of checkpoints until it is opened."""

    def __init__(self) -> None:
        self._open, self._write = threading.Event(), writer.write_save
        saving.write_save = self._wait  # type: ignore[attr-defined]

    def open(self) -> None:
        self._open.set()

    def _wait(self, *arguments: Any) -> Path:
        self._open.wait(60)
        return self._write(*arguments)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    monkeypatch.setattr(saving, "write_save", writer.write_save)  # restores it
    gate = Gate()
    yield gate
    gate.open()


def failing_writes(monkeypatch: pytest.MonkeyPatch, number: int, among: Callable[[str], bool]) -> None:
    """Let writes to files of certain names fail with this errno."""
    real = disk.ChecksummedFile.write

    def write(self: disk.ChecksummedFile, data: Any) -> None:
        if among(self.path.name):
            raise OSError(number, os.strerror(number), str(self.path))
        real(self, data)

    monkeypatch.setattr(disk.ChecksummedFile, "write", write)


def _same_bytes(rank: int, world: int, folder: Path) -> None:
    uuid.uuid4 = lambda: uuid.UUID(int=5)  # type: ignore[assignment]
    waiting = Run(folder / "waiting", rank, world, asynchronous=False)
    waiting.train(2)
    waiting.hook.finish()
    waiting.hook.close()
    gate = Gate()
    going_on = Run(folder / "going_on", rank, world, every=2)
    going_on.train(3)  # the third step changes every tensor while the second is being written
    assert not (folder / "going_on" / "step-00000002").exists()
    gate.open()
    going_on.hook.finish()
    going_on.hook.close()


def test_what_is_written_is_the_state_of_its_step_and_the_bytes_are_those_of_a_save_that_training_waits_for(
    tmp_path: Path,
) -> None:
    run_ranks(_same_bytes, 2, tmp_path)
    one, other = tmp_path / "waiting" / "step-00000002", tmp_path / "going_on" / "step-00000002"
    assert differing_bytes(other, made_up_state(2)) == 0
    names = sorted(p.name for p in one.iterdir())
    assert sorted(p.name for p in other.iterdir()) == names
    for name in set(names) - {"manifest.json"}:  # which holds the time
        assert (one / name).read_bytes() == (other / name).read_bytes(), name


def test_memory_of_an_earlier_copy_is_used_again_across_slabs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen_edit_zero.checkpoints.snapshot.SLAB_BYTES", 1000)
    run, memory = Run(tmp_path), []
    for step in (1, 2):
        run.train()
        run.hook._land()
        assert differing_bytes(tmp_path / f"step-{step:08d}", made_up_state(step)) == 0
        memory.append([slab.data_ptr() for slab in run.hook._snapshot._slabs])
    run.hook.close()
    assert len(memory[0]) > 10
    assert memory[0] == memory[1]


def test_one_that_is_due_while_another_is_written_waits(tmp_path: Path, gate: Gate) -> None:
    run = Run(tmp_path)
    run.train()
    threading.Timer(0.3, gate.open).start()
    run.train()
    assert "step 2: waiting, since the checkpoint of step 1 is still being written" in run.said
    run.train(last=True)
    run.hook.finish()
    run.hook.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000002", "step-00000003"]


def test_or_it_is_left_out_by_setting_unless_it_is_the_last(tmp_path: Path, gate: Gate) -> None:
    run = Run(tmp_path, when_busy="skip")
    run.train(3)
    assert "step 3: no checkpoint, since the checkpoint of step 1 is still being written" in run.said
    gate.open()
    run.train(last=True)
    run.hook.finish()
    run.hook.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000004"]


def _fail_in_the_background(rank: int, world: int, folder: Path, on_failure: str) -> tuple[int, str, list[str]]:
    run = Run(folder, rank, world, every=2, on_failure=on_failure)
    run.train(2)
    run.hook._land()
    with pytest.MonkeyPatch.context() as patch:
        failing_writes(patch, errno.EDQUOT, lambda name: name.startswith("rank-00001") and name.endswith("tensors"))
        if rank == 0:  # the rank whose thread is done first must not learn of it alone
            patch.setattr(saving, "write_save", lambda *a: (time.sleep(0.3), writer.write_save(*a))[1])
        try:
            run.train(2)
            while run.hook._flight is not None:
                time.sleep(0.01)
                run.step += 1
                metrics: Any = SimpleNamespace(step=2 * run.step + 1, loss=1.0, skipped=False)
                run.hook.after_step(metrics, is_last=False)
            said = ""
        except StorageError as error:
            said = str(error)
    if on_failure == "warn":
        run.step = 6
        run.train(2, last=True)
        run.hook.finish()
    run.hook.close()
    return run.step, said, run.said


def test_a_failed_write_ends_the_run_in_the_same_step_on_all_ranks(tmp_path: Path) -> None:
    (step, text, _), (other_step, other_text, _) = run_ranks(_fail_in_the_background, 2, tmp_path, "stop")
    assert step == other_step
    assert text == other_text
    assert "rank 1 on" in text
    assert "quota" in text
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000002"]
    assert differing_bytes(tmp_path / "step-00000002", made_up_state(2)) == 0


def test_or_is_told_and_training_goes_on(tmp_path: Path) -> None:
    results = run_ranks(_fail_in_the_background, 2, tmp_path, "warn")
    assert results[0][:2] == results[1][:2] == (8, "")
    (warning,) = [line for line in results[0][2] if line.startswith("warning")]
    assert "step 4 has no checkpoint, and training goes on" in warning
    assert "raised, or keep fewer checkpoints" in warning
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000008"]
    assert differing_bytes(tmp_path / "step-00000008", made_up_state(8)) == 0


@pytest.mark.parametrize("asynchronous", [False, True])
def test_the_last_checkpoint_must_be_written(
    asynchronous: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing_writes(monkeypatch, errno.ENOSPC, lambda name: name == "manifest.json.tmp")
    run = Run(tmp_path, on_failure="warn", asynchronous=asynchronous)
    with pytest.raises(StorageError, match="No space left on device"):  # noqa: PT012
        run.train(2, last=True)
        run.hook.finish()
    run.hook.close()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_has_gone_is_not_made_anew(tmp_path: Path) -> None:
    run = Run(tmp_path / "run" / "checkpoints", asynchronous=False, on_failure="warn")
    run.train()
    (tmp_path / "run").rename(tmp_path / "elsewhere")
    run.train()
    assert "is no longer there" in run.said[-1]
    assert not (tmp_path / "run").exists()
    (tmp_path / "elsewhere").rename(tmp_path / "run")
    run.train()
    run.hook.close()
    assert (
        latest_checkpoint(tmp_path / "run" / "checkpoints").path == tmp_path / "run" / "checkpoints" / "step-00000003"
    )


def test_an_error_of_the_run_waits_for_the_checkpoint_that_is_being_written(tmp_path: Path, gate: Gate) -> None:
    run = Run(tmp_path)
    with pytest.raises(ZeroDivisionError):  # noqa: PT012
        try:
            run.train()
            threading.Timer(0.3, gate.open).start()
            raise ZeroDivisionError
        finally:
            run.hook.close()
    assert verify_checkpoint(tmp_path / "step-00000001") == ()


def _terminated(rank: int, world: int, folder: Path) -> str:
    gate = Gate()
    run = Run(folder, rank, world)
    try:
        run.train()
        threading.Timer(0.3, gate.open).start()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(20)
    except SystemExit as ended:
        return f"ended with {ended.code}"
    finally:
        run.hook.close()
    return "not ended"


def test_sigterm_waits_for_it_too(tmp_path: Path) -> None:
    assert run_ranks(_terminated, 2, tmp_path) == ["ended with 143"] * 2
    assert verify_checkpoint(tmp_path / "step-00000001") == ()
    assert differing_bytes(tmp_path / "step-00000001", made_up_state(1)) == 0


def test_without_host_memory_for_a_copy_training_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saving, "available_host_bytes", lambda: 1000)
    run = Run(tmp_path)
    run.train()
    assert verify_checkpoint(tmp_path / "step-00000001") == ()
    assert "training waits while the checkpoint is written" in run.said[0]
    assert "which has 1.0 kB left" in run.said[0]
    run.hook.close()


def test_the_best_by_the_mean_loss_since_the_last_one_stay(tmp_path: Path) -> None:
    run = Run(tmp_path, asynchronous=False, every=2, keep=1, keep_best=1, keep_every=6)
    for loss in (3.0, 2.0, 0.0, 1.0, 9.0, 1.0, 5.0, 1.0, 4.0, 4.0, 1.0, 9.0):
        run.train(loss=loss)
    run.hook.finish()
    run.hook.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000004", "step-00000006", "step-00000012"]
    assert load_head(tmp_path / "step-00000004").metrics == {"loss": 0.5, "step_loss": 1.0}
    assert load_head(tmp_path / "step-00000012").metrics == {"loss": 5.0, "step_loss": 9.0}


def test_a_failing_backup_is_told_tried_again_and_holds_up_deletion_alone(tmp_path: Path) -> None:
    place = tmp_path / "backup" / "demo"
    run = Run(tmp_path / "demo" / "run", asynchronous=False, keep=1, backup=str(place.parent))
    place.parent.mkdir()
    place.write_text("a file where the folder should be")
    run.train(2)
    run.hook._caretaker.wait()  # type: ignore[union-attr]
    run.hook._pass_on()
    assert any("step-00000002 is whole, but its copy in" in line for line in run.said)
    assert sorted(p.name for p in (tmp_path / "demo" / "run").iterdir()) == ["step-00000001", "step-00000002"]
    place.unlink()
    run.train(last=True)
    run.hook.finish()
    run.hook.close()
    assert sorted(p.name for p in place.iterdir()) == ["step-00000001", "step-00000002", "step-00000003"]
    assert [p.name for p in (tmp_path / "demo" / "run").iterdir()] == ["step-00000003"]
    for copy in place.iterdir():
        assert verify_checkpoint(copy) == ()


def test_a_backup_that_cannot_be_reached_is_refused_before_training(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"checkpoint\.backup nosuch://bucket/run cannot be reached"):
        Run(tmp_path, backup="nosuch://bucket/run")


def _probed(rank: int, world: int, folder: Path) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 0:
            failing_writes(patch, errno.EROFS, lambda name: name.startswith(".probe-"))
        try:
            probe_backup(CheckpointSettings(backup=str(folder / "backup")), folder / "run")
        except SettingsError as error:
            return str(error)
    return ""


def test_so_is_one_that_takes_no_files_by_all_ranks(tmp_path: Path) -> None:
    said, other = run_ranks(_probed, 2, tmp_path)
    assert said == other
    assert "checkpoint.backup puts copies of this run, and read again: Read-only file system" in said
    assert not (tmp_path / "run").exists()


def test_copies_that_are_missing_are_made_when_the_run_goes_on(tmp_path: Path) -> None:
    folder, place = tmp_path / "demo" / "checkpoints", tmp_path / "backup"
    Run(folder, asynchronous=False).train(2)
    run = Run(folder, asynchronous=False, backup=str(place), keep=1)
    run.step = 2
    run.train(last=True)
    run.hook.finish()
    run.hook.close()
    assert sorted(p.name for p in (place / "demo").iterdir()) == ["step-00000001", "step-00000002", "step-00000003"]
    assert [p.name for p in folder.iterdir()] == ["step-00000003"]


def _catch_up(rank: int, world: int, folder: Path, backup: Path) -> list[str]:
    said: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backups, "_TURN_SECONDS", 0.01)  # several turns
        catch_up_backup(CheckpointSettings(backup=str(backup), keep=1), folder, said.append)
    return said


def test_or_when_it_is_started_again_though_it_is_complete(tmp_path: Path) -> None:
    folder, place = tmp_path / "demo" / "checkpoints", tmp_path / "backup"
    Run(folder, asynchronous=False).train(3)
    said, other = run_ranks(_catch_up, 2, folder, place)
    assert set(said) <= {f"waiting for copies in {place / 'demo'}"}  # unless they were made by then
    assert other == []
    names = ["step-00000001", "step-00000002", "step-00000003"]
    assert sorted(p.name for p in (place / "demo").iterdir()) == names
    assert sorted(p.name for p in folder.iterdir()) == names
    (place / "demo" / names[1]).rename(tmp_path / "elsewhere")
    _catch_up(0, 1, folder, place)
    assert verify_checkpoint(place / "demo" / names[1]) == ()


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_costs_no_checkpoint_but_a_place_among_the_best(loss: float, tmp_path: Path) -> None:
    run = Run(tmp_path, asynchronous=False, keep=1, keep_best=1)
    run.train(loss=5.0)
    run.train(loss=loss)
    assert [line for line in run.said if line.startswith("warning")] == [
        "warning: step 2: not finite, and so not recorded with this checkpoint, which cannot be among the best by it: "
        f"loss {loss}, step_loss {loss}"
    ]
    assert load_head(tmp_path / "step-00000002").metrics == {}
    run.train(loss=7.0)
    run.hook.finish()
    run.hook.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000001", "step-00000003"]
    assert differing_bytes(tmp_path / "step-00000003", made_up_state(3)) == 0


def test_the_folders_that_lead_to_checkpoints_survive_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[Path] = []
    monkeypatch.setattr(placement, "sync_folder", synced.append)
    Run(tmp_path / "runs" / "demo" / "checkpoints", asynchronous=False)
    assert synced == [tmp_path, tmp_path / "runs", tmp_path / "runs" / "demo"]


def test_a_tenth_of_the_memory_of_a_node_is_not_taken_for_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshot, "_available_on_node", lambda: 2000)
    monkeypatch.setattr(snapshot, "_available_in_cgroup", lambda: 1000)
    assert snapshot.available_host_bytes() == 900


def test_errors_that_are_no_storage_errors_always_end_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, on_failure="warn", asynchronous=False)
    run.engine.state["block.bias", "param"] = torch.zeros(6)
    run.engine.local_state = lambda: [FlatRange("w", "param", (7,), 0, run.engine.state["block.bias", "param"])]
    run.engine.train = lambda step: None
    with pytest.raises(QwenEditError, match="elements 6 to 6 are nowhere"):
        run.train()
    run.hook.close()
