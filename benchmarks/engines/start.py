"""Seconds from the command to the first step beside a hand-written loop, and how fast commands answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.engines import problem
from benchmarks.engines.folder import make_folder
from benchmarks.engines.tables import Table
from tests.ranks import free_port

CONFIG = problem.transformer_config(width=768, layers=4, head_dim=64)
RANKS = 2
ROUNDS = 2
STAGES = ("import", "meet", "build", "load", "first step")
TRAIN = str(problem.ROOT / "qwen_edit_zero" / "train.py")
COMMANDS: dict[str, list[str]] = {
    "python -c pass": ["-c", "pass"],
    "train.py --help": [TRAIN, "--help"],
    "train.py --print-settings": [TRAIN, "--print-settings"],
    "train.py optimizer.lrr=1 (an error)": [TRAIN, "optimizer.lrr=1"],
    "train.py --ds missing.json (an error)": [TRAIN, "--ds", "missing.json"],
    "train.py batch.global_size=0 (an error)": [TRAIN, "batch.global_size=0"],
    "python -c 'import torch'": ["-c", "import torch"],
}


def measure(rounds: int = ROUNDS) -> list[Table]:
    """Both tables."""
    return [_start(rounds), _commands()]


def _start(rounds: int) -> Table:
    path = Path(tempfile.gettempdir()) / "qwen-edit-zero-benchmark" / "start"
    make_folder(path, CONFIG)
    best: dict[tuple[str, str], dict[str, float]] = {}
    for _ in range(rounds):
        for kind in ("fsdp2", "zero2"):
            for loop in ("hand", "ours"):
                found = _run_once(loop, kind, path)
                kept = best.get((kind, loop), found)
                best[kind, loop] = {stage: min(found[stage], kept[stage]) for stage in STAGES}
    rows: list[list[object]] = []
    for (kind, loop), seconds in best.items():
        total = sum(seconds.values())
        ratio = total / sum(best[kind, "hand"].values())
        name = "ours" if loop == "ours" else "hand-written"
        rows.append([kind, name, *(f"{seconds[stage]:.2f}" for stage in STAGES), f"{total:.2f}", f"{ratio:.2f}"])
    notes = (
        f"{problem.sizes(CONFIG).whole / 1e6:.0f} M parameters in a folder in bf16, {RANKS} processes; each stage's "
        f"best of {rounds} starts, taken in turn. Hand-written: `from_pretrained` loads it, wrapping builds it. Ours "
        f"builds on the meta device, loads straight into the shards, and imports DeepSpeed while building, and only "
        f"if it is the engine; import is that of the whole training command, data and encoders included."
    )
    return Table("Start", ["engine", "loop", *STAGES, "total, s", "ratio"], rows, notes)


def _run_once(loop: str, kind: str, path: Path) -> dict[str, float]:
    """Seconds of each stage on rank 0."""
    script = str(Path(__file__).with_name("start_rank.py"))
    common = os.environ | {
        "WORLD_SIZE": str(RANKS),
        "LOCAL_WORLD_SIZE": str(RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "BEGAN": str(time.time()),
    }
    processes = [
        subprocess.Popen(
            [sys.executable, script, loop, kind, str(path)],
            env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        outputs = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, said) in zip(processes, outputs, strict=True):
        if process.returncode:
            raise RuntimeError(f"{loop} under {kind} failed:\n{said}")
    seconds: dict[str, float] = json.loads(outputs[0][0].strip().splitlines()[-1])
    return seconds


def _commands() -> Table:
    rows: list[list[object]] = []
    for name, arguments in COMMANDS.items():
        times = []
        for _ in range(5):
            began = time.perf_counter()
            subprocess.run([sys.executable, *arguments], capture_output=True, cwd=problem.ROOT, check=False)
            times.append(time.perf_counter() - began)
        traced = subprocess.run(
            [sys.executable, "-X", "importtime", *arguments],
            capture_output=True,
            text=True,
            cwd=problem.ROOT,
            check=False,
        )
        imported = any(line.endswith("| torch") for line in traced.stderr.splitlines())
        rows.append([f"`{name}`", f"{min(times):.2f}", traced.returncode, "yes" if imported else "no"])
    notes = "The best of 5. No recipe is given, so the demo's is read."
    return Table("Answers of the command", ["command", "seconds", "exit status", "imports torch"], rows, notes)
