"""A run that is asked to end saves, says so, and goes on as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qwen_edit_zero.checkpoints.validity import verify_checkpoint
from qwen_edit_zero.cluster import signals
from tests.end_to_end.commands import LAUNCHERS
from tests.ranks import free_port
from tests.training.started import ends, events, last_step, lines_of, log, train


def send(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def what_counts(run: Path) -> list[tuple[Any, ...]]:
    return [(m["step"], m["samples_seen"], m["loss"], m["grad_norm"], m["lr"]) for m in lines_of(run / "metrics.jsonl")]


@pytest.fixture(scope="module")
def undisturbed(recipe: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    assert train(2, run, arguments(recipe)) == [0, 0]
    return run


def arguments(recipe: str, *more: str) -> list[str]:
    return [recipe, "--engine", "fsdp2", "run.max_steps=9", "checkpoint.every=null", "sampling.count=0", *more]


def test_a_run_preempted_twice_has_the_losses_of_one_that_was_not(
    undisturbed: Path, recipe: str, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    assert train(2, run, arguments(recipe), (1, 2, partial(send, signal.SIGUSR1))) == [75, 75]
    first = last_step(run)
    assert first in (3, 4), "the step under way, or the one after it"
    all_ranks = [(0, 5, partial(send, signal.SIGTERM)), (1, 6, partial(send, signal.SIGTERM))]
    assert train(2, run, arguments(recipe), *all_ranks) == [75, 75]
    second = last_step(run)
    assert train(2, run, arguments(recipe)) == [0, 0]
    assert what_counts(run) == what_counts(undisturbed)

    told = [(e["event"], e["step"]) for e in events(run) if e["event"] in ("resumed", "preempted")]
    assert told == [("preempted", first), ("resumed", first), ("preempted", second), ("resumed", second)]
    assert events(run)[-1]["reason"] == "finished"
    assert [e["after"] for e in events(run) if e["event"] == "restarted"] == [
        "preempted by SIGUSR1",
        "preempted by SIGTERM",
    ]
    folders = sorted(p.name for p in (run / "checkpoints").iterdir())
    assert folders == [f"step-{step:08d}" for step in (first, second, 9)]
    for folder in folders:
        verify_checkpoint(run / "checkpoints" / folder)
    assert "was asked to end by SIGUSR1 (rank 1, " in (run / "logs" / "rank-00000.log.2").read_text()


def test_a_signal_while_a_checkpoint_is_written_waits_for_it(recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    often = arguments(recipe, "checkpoint.every=1")
    assert train(2, run, often, (0, 3, partial(send, signal.SIGUSR2))) == [75, 75]
    steps = [e["step"] for e in events(run) if e["event"] == "save"]
    assert steps == list(range(1, last_step(run) + 1)), "each step is saved once"


def test_what_takes_long_waits_until_the_run_goes_on(recipe: str, tmp_path: Path) -> None:
    """Whoever asks for the end may not wait for pictures and a held-out loss before the save."""
    run = tmp_path / "run"
    every = ["validation.every=1", "validation.samples=2", "sampling.every=1", "sampling.count=1", "run.max_steps=4"]
    given = [*arguments(recipe), *every]
    assert train(1, run, given, (0, 1, partial(send, signal.SIGUSR1))) == [75]
    last = last_step(run)
    assert last in (2, 3)
    valued = [e["step"] for e in events(run) if e["event"] == "validation"]
    assert valued == list(range(last)), "none for the step that is saved"
    assert len(list((run / "samples").iterdir())) == last - 1
    assert train(1, run, given) == [0]
    assert [e["step"] for e in events(run) if e["event"] == "validation"] == list(range(5)), "made up for, once each"


def test_a_run_whose_folder_is_moved_away_says_so(recipe: str, tmp_path: Path) -> None:
    run, moved = tmp_path / "run", tmp_path / "moved"
    given = arguments(recipe, "run.max_steps=2000")
    assert ends(1, run, given, (0, 2, partial(os.rename, run, moved))) == [1]
    assert f"was {run} deleted, moved, or its file system unmounted?" in log(moved, 0), "its log is still open"


def slow_step() -> None:
    from qwen_edit_zero.training import task

    signals.SAME_SECONDS = 0.3
    losses = task.EditTask.losses

    def slow(self: Any, forward: Any, batch: Any) -> Any:
        if last_step_of[0] >= 2:
            time.sleep(60)
        last_step_of[0] += 1 / 2  # two micro-batches a step
        return losses(self, forward, batch)

    task.EditTask.losses = slow  # type: ignore[method-assign]


last_step_of = [0.0]


def twice() -> None:
    send(signal.SIGTERM)
    send(signal.SIGTERM)  # passed on by a launcher: the same request
    time.sleep(1)
    send(signal.SIGTERM)


def test_a_second_signal_ends_at_once_whatever_the_step_does(recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    began = time.monotonic()
    with pytest.raises(AssertionError, match=r"rank \d died with exit code 143"):
        train(2, run, arguments(recipe), (0, 2, twice), before=slow_step)
    assert time.monotonic() - began < 55
    assert "SIGTERM after SIGTERM: ended at once, without saving" in log(run, 0)
    assert events(run)[-1]["status"] == 143


def slow_cache() -> None:
    from qwen_edit_zero.training import run

    def condition(*args: Any, **more: Any) -> Any:
        if "RANK" in os.environ and os.environ["RANK"] == "0":
            send(signal.SIGUSR1)
        time.sleep(60)

    run.condition = condition  # type: ignore[attr-defined]


def test_a_signal_before_training_ends_at_once_with_nothing_lost(recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    with pytest.raises(AssertionError, match=r"rank \d died with exit code 75"):
        train(2, run, arguments(recipe), before=slow_cache)
    last = log(run, 0).splitlines()
    assert "ended by SIGUSR1 outside of training; nothing is lost" in last[-2]
    assert "exit status 75: start the same command again" in last[-1]


def ranks_of(launcher: int) -> dict[int, int]:
    """Process of each rank below a launcher."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            if int(stat.read_text().rpartition(")")[2].split()[1]) == launcher:
                environ = dict(
                    word.split("=", 1) for word in (stat.parent / "environ").read_text().split("\0") if "=" in word
                )
                found[int(environ["RANK"])] = int(stat.parent.name)
        except (OSError, KeyError):
            continue
    return found


@pytest.mark.slow
def test_torchrun_restarts_a_run_whose_rank_was_killed(undisturbed: Path, recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = [str(free_port()) if word == "PORT" else word for word in LAUNCHERS["torchrun"]]
    command = [words[0], "--max-restarts", "1", *words[1:], *arguments(recipe, "checkpoint.every=2")]
    with (tmp_path / "out").open("w") as out:
        started = subprocess.Popen(
            [*command, f"run.dir={tmp_path}", "run.name=run"], cwd=tmp_path, stdout=out, stderr=out
        )
        try:
            while last_step(run) < 4:
                assert started.poll() is None, (tmp_path / "out").read_text()
                time.sleep(0.02)
            os.kill(ranks_of(started.pid)[1], signal.SIGKILL)
            assert started.wait(120) == 0, (tmp_path / "out").read_text()
        finally:
            started.kill()
    assert what_counts(run) == what_counts(undisturbed)
    assert [e["event"] for e in events(run) if e["event"] in ("restarted", "resumed")] == ["restarted", "resumed"]


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "deepspeed"])
def test_launchers_pass_the_signal_on_and_leave_time_to_save(launcher: str, recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    command = [str(free_port()) if word == "PORT" else word for word in LAUNCHERS[launcher]]
    command += [*arguments(recipe, "run.max_steps=500"), f"run.dir={tmp_path}", "run.name=run"]
    with (tmp_path / "out").open("w") as out:
        started = subprocess.Popen(command, cwd=tmp_path, stdout=out, stderr=out, start_new_session=True)
        try:
            while last_step(run) < 3:
                assert started.poll() is None, (tmp_path / "out").read_text()
                time.sleep(0.1)
            if launcher == "torchrun":
                started.terminate()
            else:  # on one node its command passes nothing on; a scheduler tells the whole job
                os.killpg(started.pid, signal.SIGTERM)
            # The launcher's own status tells nothing: it says that a signal ended it.
            assert started.wait(60) in (1, -signal.SIGTERM)
            deadline = time.monotonic() + 60
            while events(run)[-1]["event"] != "ended" and time.monotonic() < deadline:
                time.sleep(0.1)
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
    assert events(run)[-1]["status"] == 75, (tmp_path / "out").read_text()
    verify_checkpoint(run / "checkpoints" / f"step-{last_step(run):08d}")
