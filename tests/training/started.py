"""The training command on warm forked ranks, with something done to it on the way."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.ranks import _get_context, free_port, run_ranks

Action = tuple[int, int, Callable[[], Any]]  # on which rank, after which step stands in metrics.jsonl, what


def train(
    world: int, run: Path, arguments: list[str], *actions: Action, before: Callable[[], Any] | None = None
) -> Any:
    """Exit statuses of the ranks of `train.py`, given `arguments`; `run` is the folder of the run.

    AssertionError if a rank ends its process, naming its exit code. `before` is called on each rank first.
    """
    return run_ranks(_rank, world, str(run), arguments, actions, before, init_process_group=False)


def ends(
    world: int,
    run: Path,
    arguments: list[str],
    *actions: Action,
    before: Callable[[], Any] | None = None,
    seconds: float = 120.0,
) -> list[int]:
    """Exit codes of the ranks of `train.py`, each of which must end by itself within `seconds` from the start."""
    context = _get_context()
    port = free_port()
    ranks = [
        context.Process(target=_process, args=(rank, world, port, str(run), arguments, actions, before))
        for rank in range(world)
    ]
    deadline = time.monotonic() + seconds
    try:
        for process in ranks:
            process.start()
        for rank, process in enumerate(ranks):
            process.join(max(0.0, deadline - time.monotonic()))
            assert process.exitcode is not None, f"rank {rank} has not ended"
    finally:
        for process in ranks:
            if process.exitcode is None:
                process.kill()
    return [int(process.exitcode) for process in ranks]


def _process(
    rank: int, world: int, port: int, run: str, arguments: list[str], actions: list[Action], before: Any
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", DS_ACCELERATOR="cpu",
    )  # fmt: skip
    import torch

    torch.set_num_threads(1)
    sys.exit(_rank(rank, world, run, arguments, actions, before))


def _rank(rank: int, world: int, run: str, arguments: list[str], actions: list[Action], before: Any) -> int:
    from qwen_edit_zero import train as command

    if before is not None:
        before()
    mine = [action for action in actions if action[0] == rank]
    threading.Thread(target=_act, args=(Path(run), mine), daemon=True).start()
    parent, name = os.path.split(run)
    return command.main([*arguments, f"run.dir={parent}", f"run.name={name}"])


def _act(run: Path, actions: list[Action]) -> None:
    for _, step, action in actions:
        while step > last_step(run):
            time.sleep(0.005)
        action()


def last_step(run: Path) -> int:
    """The last step in a run's metrics; 0: none."""
    lines = lines_of(run / "metrics.jsonl")
    return int(lines[-1]["step"]) if lines else 0


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a JSONL file that may not be there yet."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]


def events(run: Path) -> list[dict[str, Any]]:
    """What RUN/events.jsonl says."""
    return lines_of(run / "events.jsonl")


def log(run: Path, rank: int) -> str:
    """A rank's log of the last start."""
    return (run / "logs" / f"rank-{rank:05d}.log").read_text(encoding="utf-8")
