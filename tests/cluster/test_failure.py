"""Ranks end together: whatever one of them meets, and wherever the others are."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from tests.end_to_end.commands import ROOT
from tests.ranks import free_port

PROGRAM = textwrap.dedent(
    """
    import sys, time
    sys.path.insert(0, sys.argv[1])
    from qwen_edit_zero.cluster import process_group
    from qwen_edit_zero.cluster.failure import run_guarded
    from qwen_edit_zero.cluster.identity import discover
    from qwen_edit_zero.errors import DataError

    def main():
        identity = discover()
        process_group.start(identity, timeout_seconds=600, device="cpu")
        import torch, torch.distributed as dist
        if sys.argv[2] == "all" or identity.rank == int(sys.argv[2]):
            if sys.argv[3] == "user":
                raise DataError("the picture cat.png is damaged")
            raise RuntimeError("unforeseen")
        dist.all_reduce(torch.ones(1))  # the failing rank never comes
        return 0

    sys.exit(run_guarded(main))
    """
)


def start(tmp_path: Path, who: str, what: str) -> tuple[list[int], str, float]:
    """Exit statuses of three ranks, everything they wrote, and the seconds it took."""
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    common = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(
            [sys.executable, script, str(ROOT), who, what],
            env={**os.environ, **common, "RANK": str(r), "LOCAL_RANK": str(r), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for r in range(3)
    ]
    began = time.monotonic()
    try:
        text = "".join(rank.communicate(timeout=100)[0] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], text, time.monotonic() - began


def test_a_mistake_that_all_ranks_meet_is_told_once_by_rank_0(tmp_path: Path) -> None:
    statuses, text, _ = start(tmp_path, "all", "user")
    assert statuses == [2, 2, 2]
    assert text.count("the picture cat.png is damaged") == 1
    assert "on rank" not in text
    assert "Traceback" not in text


def test_a_mistake_that_one_rank_meets_names_it_and_frees_the_others_from_a_collective(tmp_path: Path) -> None:
    statuses, text, seconds = start(tmp_path, "1", "user")
    assert statuses == [2, 2, 2]
    assert text.count("error on rank 1") == 1
    assert "the picture cat.png is damaged" in text
    assert "Traceback" not in text
    assert seconds < 90


def test_what_nobody_foresaw_shows_its_traceback_once(tmp_path: Path) -> None:
    statuses, text, _ = start(tmp_path, "2", "bug")
    assert set(statuses) == {1}
    assert text.count("RuntimeError: unforeseen") >= 1
    assert text.count("Traceback") == 1
