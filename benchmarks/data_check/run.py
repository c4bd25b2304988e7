"""How fast a check is: pictures a second of one process, rows a second where all pictures are known, and memory.

python -m benchmarks.data_check.run [ROWS]     # of the second part, 100,000 by default
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from qwen_edit_zero.commands.check import run

_PAIRS, _SIDE = 200, 1024


def photograph(seed: int, side: int = _SIDE) -> Image.Image:
    """Forms of all sizes, the finer the fainter, which take about as many bytes as a photograph."""
    random = np.random.default_rng(seed)
    picture = np.zeros((side, side, 3))
    for cells, levels in ((4, 30), (12, 25), (40, 18), (120, 12), (360, 7), (side, 4)):
        layer = np.clip(random.normal(128, 40, (cells, cells, 3)), 0, 255).astype(np.uint8)
        large = Image.fromarray(layer).resize((side, side), Image.Resampling.BICUBIC)
        picture += (np.asarray(large, float) - 128) / 40 * levels
    return Image.fromarray(np.clip(picture + 128, 0, 255).astype(np.uint8))


def main(rows: int) -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for i in range(_PAIRS):
            image = photograph(i)
            image.save(folder / f"s{i}.jpg", quality=90)
            image.paste("orange", (100, 100, 300, 300))
            image.save(folder / f"t{i}.jpg", quality=90)
        size = (folder / "s0.jpg").stat().st_size
        few = _manifest(folder / "few.jsonl", _PAIRS)
        cold = _seconds(few, folder, workers="1")
        print(f"{_SIDE} x {_SIDE} JPEG of {size / 1e3:.0f} kB, one process: {2 * _PAIRS / cold:.0f} pictures/s")
        many = _manifest(folder / "many.jsonl", rows)
        _seconds(many, folder, workers="1")  # makes the index of the manifest
        warm = _seconds(many, folder, workers="1")
        print(f"{rows:,} rows whose pictures are known, one process: {rows / warm:,.0f} rows/s")
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        print(f"memory: {peak:.0f} MiB of the first process at most")
        peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
        print(f"        {peak:.0f} MiB of each that examines rows")


def _manifest(path: Path, rows: int) -> Path:
    with path.open("w", encoding="utf-8") as file:
        for i in range(rows):
            at = i % _PAIRS
            row = {"id": f"{i}", "source": f"s{at}.jpg", "target": f"t{at}.jpg", "instruction": f"把第 {i} 处改成橙色"}
            file.write(json.dumps(row) + "\n")
    return path


def _seconds(manifest: Path, folder: Path, workers: str) -> float:
    begun = time.monotonic()
    out = folder / "out"
    run([str(manifest), "--out", str(out), "--workers", workers, f"data.cache_dir={folder / 'cache'}"])
    return time.monotonic() - begun


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 100_000)
