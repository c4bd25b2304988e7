"""Measure the word filter and the cost of preparing instructions: `python benchmarks/instructions/run.py [NAME ...]`.

Names: filter, cost; none: both. The tables of the last run of each also go to runs/benchmarks/instructions/NAME.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

NAMES = ("filter", "cost")

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from benchmarks import by_name

    sys.exit(by_name.run("instructions", NAMES, sys.argv[1:]))
