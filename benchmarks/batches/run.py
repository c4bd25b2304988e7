"""Measure schedules and loading: `python benchmarks/batches/run.py [NAME ...]`.

Names: schedule, loading, training; none: all. The tables of the last run of each also go to
runs/benchmarks/batches/NAME.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

NAMES = ("schedule", "loading", "training")

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from benchmarks import by_name

    sys.exit(by_name.run("batches", NAMES, sys.argv[1:]))
