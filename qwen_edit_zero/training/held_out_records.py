"""Lines of `metrics.jsonl` about held-out losses. Imports no torch."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

HELD_OUT = "held_out_loss"  # the key by which they are known


def held_out_records(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl` about held-out losses, in order of steps; of a step the last one counts."""
    by_step: dict[int, dict[str, Any]] = {}
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if f'"{HELD_OUT}"' not in line:
                continue
            with contextlib.suppress(ValueError, RecursionError):
                row = json.loads(line)
                if isinstance(row, dict) and HELD_OUT in row and isinstance(row.get("step"), int):
                    by_step[row["step"]] = row
    return [by_step[step] for step in sorted(by_step)]
