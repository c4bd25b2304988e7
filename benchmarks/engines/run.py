"""Run the engine benchmarks and print their tables: `python benchmarks/engines/run.py [NAME ...]`.

Names: memory, wire, overhead, start, loading; none: all, in this order. The tables of the last run of each also go to
runs/benchmarks/engines/NAME.md.
"""

from __future__ import annotations

import sys
from pathlib import Path

NAMES = ("memory", "wire", "overhead", "start", "loading")

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])
    from benchmarks import by_name

    sys.exit(by_name.run("engines", NAMES, sys.argv[1:]))
