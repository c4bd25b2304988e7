"""Run the checkpoint benchmarks and print their tables: `python benchmarks/checkpoints/run.py [NAME ...]`.

Names: kills, damage, stall, resume; none: all, in this order. The tables of the last run of each also go to
runs/benchmarks/checkpoints/NAME.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

NAMES = ("kills", "damage", "stall", "resume")

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from benchmarks import by_name

    sys.exit(by_name.run("checkpoints", NAMES, sys.argv[1:]))
