"""Run the checkpoint benchmarks and print their tables: `python benchmarks/checkpoints/run.py [NAME ...]`.

Names: kills, damage, stall, resume; none: all, in this order. The tables of the last run of each also go to
runs/benchmarks/checkpoints/NAME.md.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("kills", "damage", "stall", "resume")


def main(names: list[str]) -> int:
    """Run those benchmarks; 2 if one is unknown."""
    unknown = set(names) - set(NAMES)
    if unknown:
        print(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}", file=sys.stderr)
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = ROOT / "runs" / "benchmarks" / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or NAMES:
        began = time.monotonic()
        tables = importlib.import_module(f"benchmarks.checkpoints.{name}").measure()
        text = "\n".join(table.markdown() for table in tables)
        print(f"{text}\n({name}: {time.monotonic() - began:.0f} s)\n", flush=True)
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    sys.exit(main(sys.argv[1:]))
