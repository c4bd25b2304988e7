"""Only the start that took a run's folder last writes into it, whatever earlier ones believe."""

from __future__ import annotations

import hashlib
import os
import signal
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qwen_edit_zero.checkpoints.coordination import Coordinator
from qwen_edit_zero.checkpoints.rank_file import stream_ranges
from qwen_edit_zero.checkpoints.validity import verify_checkpoint
from qwen_edit_zero.checkpoints.writer import Contents, plan_save, write_save
from qwen_edit_zero.cluster.fencing import Fence
from qwen_edit_zero.errors import FencedError, SettingsError, StorageError
from qwen_edit_zero.training.events import Events
from qwen_edit_zero.training.metrics import MetricsWriter
from qwen_edit_zero.training.run_folder import take
from qwen_edit_zero.training.run_lock import RunLock
from tests.checkpoints.states import MODEL, differing_bytes, made_up_state, owned_ranges
from tests.training.started import events, last_step, lines_of, log, train


def test_a_newer_start_shuts_an_older_one_out(tmp_path: Path) -> None:
    first = Fence(tmp_path)
    first.check()
    second = Fence(tmp_path)
    assert (first.token.number, second.token.number) == (1, 2)
    with pytest.raises(FencedError, match=r"now belongs to start 2 \(process \d+ on .*start 1, ends"):
        first.check()
    second.check()
    (tmp_path / ".fence").unlink()
    with pytest.raises(StorageError, match="cannot be read any more"):
        second.check()


def test_of_two_that_take_the_folder_at_once_one_stays(tmp_path: Path) -> None:
    fences: list[Fence] = []
    threads = [threading.Thread(target=lambda: fences.append(Fence(tmp_path))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    left = 0
    for fence in fences:
        try:
            fence.check()
            left += 1
        except FencedError:
            pass
    assert left == 1


SLURM = {"SLURM_JOB_ID": "77"}


def test_a_later_start_of_the_same_job_takes_the_folder_and_no_other_does(tmp_path: Path) -> None:
    first = RunLock(tmp_path, environ=SLURM)
    for other in ({}, SLURM, {"SLURM_JOB_ID": "78", "SLURM_RESTART_COUNT": "1"}):
        with pytest.raises(SettingsError, match=r"in use by process \d+ on .* \(Slurm job 77\).*--take-over"):
            RunLock(tmp_path, environ=other)
    first.fence.check()
    second = RunLock(tmp_path, environ=SLURM | {"SLURM_RESTART_COUNT": "1"})
    assert second.taken_from is not None
    with pytest.raises(FencedError):
        first.fence.check()
    with pytest.raises(SettingsError):
        RunLock(tmp_path, environ={})  # the second holds it, not the first
    first.release()
    with pytest.raises(SettingsError):
        RunLock(tmp_path, environ={})
    second.release()
    RunLock(tmp_path, environ={}).release()


def test_the_user_can_take_the_folder_from_a_run_that_is_gone(tmp_path: Path) -> None:
    gone = take(tmp_path)
    with take(tmp_path, take_over=True) as mine:
        assert mine.taken_from is not None
        mine.fence.check()
        with pytest.raises(FencedError):
            gone.fence.check()


def test_files_that_grow_are_not_those_that_an_older_start_has_open(tmp_path: Path) -> None:
    first = Fence(tmp_path)
    old_events, old_metrics = Events(tmp_path, first), MetricsWriter(tmp_path, first_step=0, tensorboard=False)
    old_events.write("start", step=0)
    new_events = Events(tmp_path, Fence(tmp_path))
    MetricsWriter(tmp_path, first_step=0, tensorboard=False).close()
    first.check_often = lambda: None  # type: ignore[method-assign]  # it was stopped just after it had looked
    old_events.write("save", step=3)
    old_metrics._file.write("stale\n")
    old_metrics.close()
    new_events.write("start", step=0)
    assert [(e["event"], e["start"]) for e in events(tmp_path)] == [("start", 1), ("start", 2)]
    assert lines_of(tmp_path / "metrics.jsonl") == []


def save(folder: Path, state: int, may_write: Any = lambda: None) -> Path:
    ranks = Coordinator()
    contents = Contents(5, {"step": 5, "samples_seen": 40}, {}, MODEL, "made-up")
    ranges = partial(owned_ranges, made_up_state(state), 0, 1, 0)
    plan = plan_save(folder, contents, ranges, ranks, None, may_write)
    return write_save(plan, stream_ranges(plan.changing, ranges), ranks)


def test_an_older_start_that_looked_just_before_harms_no_checkpoint_of_the_newer(tmp_path: Path) -> None:
    """The newer start takes over and saves the same step after the older one looked for the last time."""
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            for hidden in tmp_path.glob(".step-*"):  # as a start does before it writes
                hidden.rename(tmp_path / ".gone")
            save(tmp_path, state=2)

    with pytest.raises(StorageError):
        save(tmp_path, state=1, may_write=look)
    verify_checkpoint(tmp_path / "step-00000005")
    assert differing_bytes(tmp_path / "step-00000005", made_up_state(2)) == 0


def stop(run: Path) -> None:
    (run / "stopped").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def is_stopped(run: Path) -> int:
    """The process that has stopped itself; 0: none yet."""
    if not (run / "stopped").exists() or not (text := (run / "stopped").read_text()):
        return 0
    state = Path(f"/proc/{text}/stat").read_text().rpartition(")")[2].split()[0]
    return int(text) if state == "T" else 0


def contents(run: Path, own: set[Path]) -> dict[str, str]:
    """Every file of the run but those that only the older start writes: its log, its events for TensorBoard."""
    files = [p for p in run.rglob("*") if p.is_file() and p not in own and not p.name.endswith(".log.1")]
    return {str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def test_a_frozen_copy_that_wakes_up_writes_nothing_into_the_newer_run(recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    arguments = [recipe, "--engine", "ddp", "run.max_steps=6", "checkpoint.every=1", "sampling.count=0"]
    ended: list[BaseException] = []

    def older() -> None:
        try:
            train(1, run, arguments, (0, 2, partial(stop, run)))
        except AssertionError as error:
            ended.append(error)

    thread = threading.Thread(target=older)
    thread.start()
    deadline = time.monotonic() + 120
    while not (process := is_stopped(run)):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    own = set((run / "tensorboard").iterdir())
    try:
        with pytest.raises(AssertionError, match="exit code 2"):
            train(1, run, arguments)
        assert train(1, run, [*arguments, "--take-over"]) == [0]
        newer = contents(run, own)
    finally:
        os.kill(process, signal.SIGCONT)
        thread.join(60)
    assert "died with exit code 1" in str(ended[0])
    assert contents(run, own) == newer
    assert last_step(run) == 6
    assert "now belongs to start 2" in (run / "logs" / "rank-00000.log.1").read_text()
    assert "finished 6 steps" in log(run, 0)
    for folder in (run / "checkpoints").glob("step-*"):
        verify_checkpoint(folder)
