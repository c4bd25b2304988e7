"""Ranks that are killed, frozen or stuck: all end soon, the right one is named, and the run can go on."""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

from qwen_edit_zero.checkpoints.validity import latest_checkpoint
from tests.training.started import ends, events, last_step, lines_of, log, train


def kill(number: signal.Signals) -> None:
    os.kill(os.getpid(), number)


def arguments(recipe: str, *more: str) -> list[str]:
    return [recipe, "run.max_steps=40", "checkpoint.every=2", "sampling.count=0", "run.silent_seconds=8", *more]


def test_a_killed_rank_is_named_in_the_last_lines_and_the_run_goes_on(recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = arguments(recipe, "--ds", "ds_configs/zero2.json", "engine.timeout_seconds=77")
    assert ends(2, run, given, (1, 5, partial(kill, signal.SIGKILL)), before=partial(note_timeouts, run)) == [
        1,
        -signal.SIGKILL,
    ]
    ended = events(run)[-1]
    assert (ended["event"], ended["rank"], ended["status"]) == ("ended", 1, 1)
    assert "ended without a word (killed, or out of memory?)" in ended["reason"]
    assert ended["step"] >= 5
    last = log(run, 0).splitlines()
    assert "error on rank 1 (" in last[-2]
    assert "run failed on rank 1 (" in last[-1]
    assert latest_checkpoint(run / "checkpoints").path is not None
    assert train(2, run, [*given, "run.max_steps=8"], before=partial(note_timeouts, run)) == [0, 0]
    assert [m["step"] for m in lines_of(run / "metrics.jsonl")] == list(range(1, 9))
    assert [e["after"] for e in events(run) if e["event"] == "restarted"] == [ended["reason"]]
    told = (run / "timeouts-0").read_text().split()
    assert set(told) == {"77.0", "21600.0"}, "every group has the run's; that of checkpoint writers has six hours"


def note_timeouts(run: Path) -> None:
    from qwen_edit_zero.cluster import process_group

    stop = process_group.stop

    def noting() -> None:
        import torch
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        groups = list(distributed_c10d._world.pg_map)
        seconds = [g._get_backend(torch.device("cpu")).options._timeout.total_seconds() for g in groups]
        (run / f"timeouts-{dist.get_rank()}").write_text(" ".join(map(str, seconds)))
        stop()

    process_group.stop = noting


def test_a_frozen_rank_is_named_and_ended_with_the_others(recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = arguments(recipe, "--engine", "fsdp2")
    assert ends(2, run, given, (1, 3, partial(kill, signal.SIGSTOP))) == [1, -signal.SIGKILL]
    ended = events(run)[-1]
    assert (ended["event"], ended["rank"]) == ("ended", 1)
    assert "has given no sign of life for 8 s" in ended["reason"]


def test_the_loss_of_rank_0_is_noticed_by_the_others(recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = arguments(recipe, "--engine", "ddp", "batch.global_size=6")
    assert ends(3, run, given, (0, 3, partial(kill, signal.SIGKILL))) == [-signal.SIGKILL, 1, 1]
    for rank in (1, 2):
        assert "failed on rank 0 (" in log(run, rank).splitlines()[-1]


def stuck_on_rank_1() -> None:
    from qwen_edit_zero.edit_data.batches.loader import StepBatches

    if os.environ["RANK"] != "1":
        return
    go_through = StepBatches.__iter__
    steps = [0]

    def iterate(self: Any) -> Any:
        steps[0] += 1
        for batch in go_through(self):
            if steps[0] == 15:  # the loader goes through each step once more, to see that it is used up
                time.sleep(600)
            yield batch

    StepBatches.__iter__ = iterate  # type: ignore[method-assign]


def test_a_step_that_hangs_is_noticed_and_the_rank_behind_named_with_its_stack(recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = arguments(recipe, "--engine", "fsdp2", "run.hang_seconds=8", "run.hang_factor=2")
    assert ends(2, run, given, before=stuck_on_rank_1) == [75, 75]
    ended = events(run)[-1]
    assert (ended["event"], ended["rank"], ended["status"]) == ("ended", 1, 75)
    assert "step 8 has not ended after" in ended["reason"]
    assert "behind: rank 1 (" in ended["reason"]
    assert "step 8, waiting for the data of micro-batch 1" in ended["reason"]
    culprit, other = ((run / "logs" / f"hang-rank-{rank:05d}.txt").read_text() for rank in (1, 0))
    assert "in iterate" in culprit, "the stack"
    assert "here: step 8, waiting for the data of micro-batch 1" in culprit
    assert "here: step 8, forward and backward of micro-batch 1" in other
    assert "samples of the micro-batch: " in other
    assert "none" not in other.split("samples of the micro-batch: ")[1].splitlines()[0]
    assert last_step(run) == 7
