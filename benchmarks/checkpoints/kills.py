"""Training killed at random moments, across steps and saves, and started again each time: what is lost?"""

from __future__ import annotations

import random
import re
import statistics
import tempfile
import time
from pathlib import Path

from benchmarks.checkpoints.training import Job, recipe, recorded
from benchmarks.engines.tables import Table

KILLS = 200
EVERY = 3  # steps between checkpoints: a good part of the time is spent saving
DEADLINE = 120.0  # seconds for anything; longer means that a rank hangs


def measure(kills: int = KILLS, seed: int = 0) -> list[Table]:
    """Kill one or all of two ranks `kills` times; compare with a run that nobody disturbed."""
    rows = []
    for asynchronous in (False, True):
        with tempfile.TemporaryDirectory() as scratch:
            rows.append(_killed(Path(scratch), kills // 2, random.Random(seed + asynchronous), asynchronous))
    notes = (
        f"Two ranks under FSDP2, a checkpoint every {EVERY} steps. Each time all ranks (as when a node dies) or one of "
        "them get SIGKILL, at a moment drawn evenly over the two seconds after the first new step or, one time in "
        "five, over the start. Exact: every loss and gradient norm recorded since is the same to the bit as that of "
        "the run nobody disturbed, each step once. Lost: steps that had been recorded and were done again."
    )
    columns = [
        "saves", "kills", "exact resumes", "steps", "steps lost, mean", "most",
        "seconds to the next step, median", "ranks left hanging",
    ]  # fmt: skip
    return [Table("SIGKILL at random moments", columns, rows, notes)]


def _wait_for_new_step(run: Path, job: Job, log: Path) -> None:
    """Until metrics.jsonl has a line of this start."""
    deadline = time.monotonic() + DEADLINE
    while "training steps" not in log.read_text(encoding="utf-8") if log.exists() else True:
        assert job.alive, log.read_text(encoding="utf-8")
        assert time.monotonic() < deadline, "no start"
        time.sleep(0.02)
    lines = len(recorded(run))
    while len(recorded(run)) <= lines:
        assert job.alive, log.read_text(encoding="utf-8")
        assert time.monotonic() < deadline, "no step"
        time.sleep(0.02)


def _killed(folder: Path, kills: int, drawn: random.Random, asynchronous: bool) -> list[object]:
    def arguments(name: str, steps: int) -> list[str]:
        return recipe(folder, name=name, max_steps=steps, every=EVERY, asynchronous=asynchronous)

    run, log = folder / "killed", folder / "log.txt"
    seen: list[dict[int, tuple[float, float]]] = []
    lost, seconds, hanging = [], [], 0
    for _ in range(kills):
        before = recorded(run)
        job, began = Job(arguments("killed", 10**6), log), time.monotonic()
        job.start()
        if drawn.random() < 0.2:
            time.sleep(drawn.uniform(0.0, 4.0))
        else:
            _wait_for_new_step(run, job, log)
            seconds.append(time.monotonic() - began)
            time.sleep(drawn.uniform(0.0, 2.0))
        job.kill([0, 1] if drawn.random() < 0.5 else [drawn.randrange(2)])
        hanging += None in job.wait(DEADLINE)
        after = recorded(run)
        seen.append(after)
        if (began_at := re.search(r"training steps (\d+) to", log.read_text(encoding="utf-8"))) and before:
            lost.append(max(before) - int(began_at[1]) + 1)
        log.write_text("")
    reference = Job(arguments("undisturbed", max(max(steps, default=0) for steps in seen)), folder / "reference.txt")
    reference.start()
    assert set(reference.wait(3600)) == {0}, (folder / "reference.txt").read_text()
    expected = recorded(folder / "undisturbed")
    exact = sum(
        sorted(steps) == list(range(1, len(steps) + 1))
        and all(expected[step] == found for step, found in steps.items())
        for steps in seen
    )
    return [
        "in the background" if asynchronous else "while training waits",
        kills,
        f"{exact} ({exact / kills:.0%})",
        max(seen[-1]),
        f"{statistics.mean(lost or [0]):.1f}",
        max(lost, default=0),
        f"{statistics.median(seconds or [0]):.1f}",
        hanging,
    ]
