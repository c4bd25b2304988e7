"""The share of a real run's time that it waits for data: the tiny model on the demo pictures, cache filled."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.by_name import ROOT
from benchmarks.engines.tables import Table

STEPS = 40


def _run(folder: Path, name: str, ranks: int) -> list[dict[str, float]]:
    command = [
        str(Path(sys.executable).with_name("torchrun")), f"--nproc_per_node={ranks}", "qwen_edit_zero/train.py",
        "recipes/demo.yaml", f"run.dir={folder}", f"run.name={name}", f"run.max_steps={STEPS}", "sampling.count=0",
        "schedule.warmup_steps=0", f"data.cache_dir={folder / 'cache'}", "checkpoint.every=null",
    ]  # fmt: skip
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    lines = (folder / name / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def measure() -> list[Table]:
    """Two runs over one cache; the second finds everything there."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for ranks in (1, 2):
            _run(Path(name), f"fill-{ranks}", ranks)
            steps = _run(Path(name), f"warm-{ranks}", ranks)
            waited = sum(s["data_seconds"] for s in steps)
            total = sum(s["step_seconds"] for s in steps)
            each = [s["data_seconds"] * 1e3 for s in steps]
            rows.append(
                (str(ranks), f"{total / STEPS:.2f}", f"{statistics.median(each):.2f}", f"{max(each):.1f}",
                 f"{waited / total:.3%}", f"{statistics.mean(s['imbalance'] for s in steps):.1%}")
            )  # fmt: skip
    columns = ("ranks", "s a step", "ms waited, median", "ms waited, most", "share waited", "imbalance, mean")
    return [Table(f"{STEPS} steps of recipes/demo.yaml, cache warm", columns, rows)]
