"""Ranks that end without a word, before the others have met them or in the middle of a collective."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from tests.ranks import free_port

ROOT = Path(__file__).parents[2]
PROGRAM = textwrap.dedent(
    """
    import os, signal, socket, sys, time
    sys.path.insert(0, sys.argv[1])
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    from qwen_edit_zero.cluster import failure, last_words
    from qwen_edit_zero.cluster.failure import run_guarded
    from qwen_edit_zero.cluster.pulse import position
    from qwen_edit_zero.cluster.identity import discover
    from qwen_edit_zero.errors import SettingsError

    def main():
        identity = discover()
        if sys.argv[2] in (f"early {identity.rank}", "early both"):
            raise SettingsError("the recipe of this node is another one")
        from qwen_edit_zero.cluster import process_group
        process_group.start(identity, timeout_seconds=600, device="cpu")
        import torch, torch.distributed as dist
        dist.all_reduce(torch.ones(1))  # both have met
        dist.barrier()
        position.begin(37)
        position.at("forward and backward of micro-batch 2")
        ended = lambda f: f"ended with status {f.status}"
        last_words.at_end(last_words.LastWords(lambda f: None, ended, lambda text: None))
        time.sleep(3)  # a sign of life tells of it
        failure.expect_signs_within(5)
        if sys.argv[2] == f"freeze {identity.rank}":
            print("frozen", os.getpid(), flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
        if sys.argv[2] == f"kill {identity.rank}":
            os.kill(os.getpid(), signal.SIGKILL)
        if sys.argv[2] == "kill 0":
            time.sleep(600)  # busy with something that notices nothing
        dist.all_reduce(torch.ones(1))
        process_group.stop()
        return 0

    sys.exit(run_guarded(main))
    """
)


def run(tmp_path: Path, case: str, *, nodes: int = 1) -> tuple[list[int], str, float]:
    """Exit statuses of two ranks that no launcher looks after, what they wrote, and the seconds it took.

    With two `nodes` each rank takes itself for the only one on its node.
    """
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    if nodes > 1:
        common["LOCAL_WORLD_SIZE"] = "1"
    began = time.monotonic()
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(ROOT), case],
            env={**os.environ, **common, "RANK": str(r), "LOCAL_RANK": str(r if nodes == 1 else 0)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(2)
    ]
    try:
        outputs = {r: rank.communicate(timeout=100)[0] for r, rank in enumerate(ranks) if case != f"freeze {r}"}
        for r, rank in enumerate(ranks):
            if r not in outputs:
                rank.kill()  # as a launcher does, if its brother has not
                outputs[r] = rank.communicate(timeout=10)[0]
        text = "".join(outputs.values())
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], text, time.monotonic() - began


def test_a_job_without_mistakes_ends_well(tmp_path: Path) -> None:
    statuses, text, _ = run(tmp_path, "none")
    assert statuses == [0, 0]
    assert text.count("\n") == 1
    assert text.startswith("2 ranks, started by environment, meet at ")


def test_a_rank_that_waits_to_meet_another_is_freed_when_that_one_has_failed(tmp_path: Path) -> None:
    statuses, text, seconds = run(tmp_path, "early 1")
    assert statuses == [2, 2]
    assert text.count("the recipe of this node is another one") == 1
    assert "error on rank 1" in text
    assert seconds < 60


def test_a_rank_on_another_node_hears_at_once_that_rank_0_has_failed_before_they_met(tmp_path: Path) -> None:
    statuses, text, seconds = run(tmp_path, "early 0", nodes=2)
    assert statuses == [2, 2], text
    assert text == "error: the recipe of this node is another one\n"
    assert seconds < 45


def test_a_mistake_on_all_nodes_is_told_once(tmp_path: Path) -> None:
    statuses, text, seconds = run(tmp_path, "early both", nodes=2)
    assert statuses == [2, 2], text
    assert text == "error: the recipe of this node is another one\n"
    assert seconds < 45


def test_a_killed_rank_is_named_with_its_step(tmp_path: Path) -> None:
    statuses, text, seconds = run(tmp_path, "kill 1")
    assert statuses == [1, -signal.SIGKILL]
    lines = text.splitlines()
    assert lines[-2].startswith("error on rank 1 (")
    assert "at step 37: it ended without a word (killed, or out of memory?)" in lines[-2]
    assert lines[-1] == "ended with status 1"
    assert "Traceback" not in text
    assert seconds < 60


def test_the_end_of_rank_0_ends_ranks_that_are_busy(tmp_path: Path) -> None:
    statuses, text, seconds = run(tmp_path, "kill 0")
    assert statuses == [-signal.SIGKILL, 1], text
    assert "lost contact with rank 0" in text
    assert text.splitlines()[-1] == "ended with status 1"
    assert seconds < 60


def test_a_frozen_rank_is_named_and_ended(tmp_path: Path) -> None:
    statuses, text, seconds = run(tmp_path, "freeze 1")
    assert statuses == [1, -signal.SIGKILL], text
    assert "error on rank 1 (" in text
    assert "at step 37: it has given no sign of life for 5 s (last: forward and backward of micro-batch 2)" in text
    assert seconds < 60


def test_a_frozen_rank_0_whose_store_says_nothing_is_missed(tmp_path: Path) -> None:
    statuses, text, seconds = run(tmp_path, "freeze 0")
    assert statuses[1] == 1, text
    assert f"lost contact with rank 0 ({socket.gethostname()}), which has not answered for 5 s: it is frozen" in text
    assert seconds < 60


def guarded(body: str, rank: str | None = None) -> tuple[int, str]:
    """Exit status and error output of one process without torch whose main does `body`."""
    code = f"from qwen_edit_zero.cluster.failure import run_guarded\nimport sys, os, signal\ndef main():\n    {body}\n"
    environment = {"PATH": os.environ["PATH"], **({} if rank is None else {"RANK": rank, "LOCAL_RANK": rank})}
    done = subprocess.run(
        [sys.executable, "-c", f"{code}sys.exit(run_guarded(main))"],
        cwd=ROOT,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a suite in the background ignores it
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


def test_a_single_process_ends_with_the_status_of_what_happened() -> None:
    assert guarded("return 0") == (0, "")
    assert guarded("return 3") == (3, "")
    assert guarded("sys.exit(0)") == (0, "")
    assert guarded("os.kill(os.getpid(), signal.SIGINT)") == (130, "interrupted\n")
    status, text = guarded("1 / 0")
    assert status == 1
    assert text.startswith("Traceback")
    assert text.endswith("error: ZeroDivisionError: division by zero\n")


def test_before_ranks_meet_rank_0_speaks_at_once_and_others_leave_time_for_the_launcher() -> None:
    mistake = "from qwen_edit_zero.errors import DataError; raise DataError('no picture')"
    began = time.monotonic()
    assert guarded(mistake, "0") == (2, "error: no picture\n")
    at_once = time.monotonic() - began
    began = time.monotonic()
    status, text = guarded(mistake, "1")
    assert status == 2
    assert text.startswith("error on rank 1 (")
    assert time.monotonic() - began > at_once + 1.5
