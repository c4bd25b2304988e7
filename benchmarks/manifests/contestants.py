"""Who opens a manifest: this package, and `datasets`. Run in a new process: `contestants.py NAME MANIFEST FOLDER`.

Prints a JSON object: seconds to open (without imports), processor seconds of all its threads and processes for that,
seconds for 10,000 rows at random, and a sum over a column.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

import numpy as np

LOOKED_UP = 10_000


def ours(manifest: Path, folder: Path) -> dict[str, float]:
    """All rows are checked (keys, types, names, ids unique), and categories and weights become columns."""
    from qwen_edit_zero.edit_data.manifests.opening import open_manifest

    began, worked = time.perf_counter(), _processor_seconds()
    table = open_manifest(manifest, index_folder=folder)
    opened, worked = time.perf_counter(), _processor_seconds() - worked
    chosen = np.random.default_rng(0).integers(0, len(table), LOOKED_UP)
    length = sum(len(table[int(i)].instruction) for i in chosen)
    return {
        "open": opened - began, "processor": worked, "look_up": time.perf_counter() - opened, "check": length,
    }  # fmt: skip


def datasets(manifest: Path, folder: Path) -> dict[str, float]:
    """Rows become Arrow; nothing is checked but that types agree."""
    os.environ.update(HF_HUB_OFFLINE="1", HF_HOME=str(folder), HF_DATASETS_DISABLE_PROGRESS_BARS="1")
    from datasets import load_dataset

    began, worked = time.perf_counter(), _processor_seconds()
    table = load_dataset("json", data_files=str(manifest), split="train", cache_dir=str(folder))
    opened, worked = time.perf_counter(), _processor_seconds() - worked
    chosen = np.random.default_rng(0).integers(0, len(table), LOOKED_UP)
    length = sum(len(table[int(i)]["instruction"]) for i in chosen)
    return {
        "open": opened - began, "processor": worked, "look_up": time.perf_counter() - opened, "check": length,
    }  # fmt: skip


def _processor_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]  # in microseconds:
    return sum(u.ru_utime + u.ru_stime for u in used)  # a few thousand rows take less than a tick of os.times


if __name__ == "__main__":
    name, manifest, folder = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    print(json.dumps({"ours": ours, "datasets": datasets}[name](manifest, folder)))
