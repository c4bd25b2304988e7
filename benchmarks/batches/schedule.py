"""What it takes to know which samples a step has, by the size of the data set."""

from __future__ import annotations

import json
import subprocess
import sys

from benchmarks.engines.tables import Table

SIZES = (10_000, 1_000_000, 10_000_000)
_SCRIPT = """
import json, resource, sys, time
import numpy as np
from qwen_edit_zero.edit_data.batches.repeats import repeats
from qwen_edit_zero.edit_data.batches.schedule import SampleSchedule

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

count, balanced = int(sys.argv[1]), sys.argv[2] == "balanced"
random = np.random.default_rng(0)
buckets = random.integers(0, 500, count, np.int32)
categories = random.choice(12, count, p=np.arange(1, 13) / 78).astype(np.int32)
before, began = peak(), time.perf_counter()
how_often = repeats(categories, [str(c) for c in range(12)], balance="uniform") if balanced else None
schedule = SampleSchedule(buckets, seed=1, global_size=512, repeats=how_often)
made, memory = time.perf_counter() - began, peak() - before
began = time.perf_counter()
first = schedule.steps_before_epoch(100) + 7
schedule.step(first), schedule.samples_before(first)
resumed = time.perf_counter() - began
began = time.perf_counter()
for step in range(first, first + 200):
    schedule.step(step)
print(json.dumps([made, memory, resumed * 1e3, (time.perf_counter() - began) / 200 * 1e3]))
"""


def measure() -> list[Table]:
    """Seconds and memory of a schedule, each in a process of its own."""
    rows = []
    for balance in ("none", "balanced"):
        for count in SIZES:
            done = subprocess.run(
                [sys.executable, "-c", _SCRIPT, str(count), balance], capture_output=True, text=True, check=True
            )
            made, memory, resumed, step = json.loads(done.stdout)
            name = "none" if balance == "none" else "uniform"
            rows.append((f"{count:,}", name, f"{made:.2f}", f"{memory:.0f}", f"{resumed:.1f}", f"{step:.2f}"))
    return [
        Table(
            "Schedule of 512 samples a step, 500 buckets, 12 categories",
            ("samples", "data.balance", "s to make it", "MB while made", "ms to go on in epoch 100", "ms a step"),
            rows,
            "Memory is the growth of the peak resident set; the columns of buckets and categories were there before.",
        )
    ]
