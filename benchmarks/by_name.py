"""Running the benchmarks of a folder by name: `measure()` of each module, its tables printed and kept."""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(group: str, names: Sequence[str], chosen: Sequence[str]) -> int:
    """Run `chosen` (none: all) of the benchmarks `names` in benchmarks/GROUP; 2 if one is unknown.

    Tables also go to runs/benchmarks/GROUP/NAME.md.
    """
    unknown = set(chosen) - set(names)
    if unknown:
        print(f"no such benchmark: {', '.join(sorted(unknown))}; there are {', '.join(names)}", file=sys.stderr)
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder = ROOT / "runs" / "benchmarks" / group
    folder.mkdir(parents=True, exist_ok=True)
    for name in chosen or names:
        began = time.monotonic()
        tables = importlib.import_module(f"benchmarks.{group}.{name}").measure()
        text = "\n".join(table.markdown() for table in tables)
        print(f"{text}\n({name}: {time.monotonic() - began:.0f} s)\n", flush=True)
        (folder / f"{name}.md").write_text(text, encoding="utf-8")
    return 0
