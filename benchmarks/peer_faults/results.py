"""results.json: cells by tool and fault, added one at a time, also by several processes."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).with_name("results.json")


def read(path: Path = RESULTS) -> dict[str, Any]:
    """By tool: its title, versions, and cells by fault."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def store(path: Path, tool: str, title: str, versions: dict[str, str], fault: str, cell: dict[str, Any]) -> None:
    """Add or replace one cell."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        found = read(path)
        entry = found.setdefault(tool, {"cells": {}})
        entry |= {"title": title, "versions": versions}
        entry["cells"][fault] = cell
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    finally:
        os.close(folder)
