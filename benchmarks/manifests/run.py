"""Rows a second, start-up and memory of opening a JSON Lines manifest, beside `datasets`.

    python -m benchmarks.manifests.run FOLDER [--rows 10000 1000000 10000000] [--rounds 3]

A contestant opens a manifest twice, each time in a new process: first with nothing there, then with what the first
left. Each round runs the contestants in turn; medians are told, memory is the highest. Memory is sampled every 10 ms:
anonymous is what cannot be dropped, mapped are pages of files, which the kernel drops when others need room.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.watched import run_watched

CONTESTANTS = ("ours", "datasets")
_CHUNK = 50_000


@dataclass
class Measured:
    """One opening: seconds to open and to look rows up, processor seconds of opening, peaks in MiB."""

    open: float
    look_up: float
    processor: float
    anonymous: float
    mapped: float
    check: float


def make_manifest(path: Path, rows: int) -> None:
    """About 230 bytes a row: one to three references in folders of a thousand, instructions in two languages."""
    with path.open("w", encoding="utf-8") as file:
        for start in range(0, rows, _CHUNK):
            lines = []
            for i in range(start, min(start + _CHUNK, rows)):
                sources = [f"images/{i // 1000:05d}/{i:08d}-{n}.jpg" for n in range(1 + i % 3)]
                row = {
                    "id": f"sample-{i:08d}",
                    "source": sources,
                    "instruction": f"把图1的裙子换成{i % 977}号颜色"
                    if i % 2
                    else f"change the dress to colour {i % 977}",
                    "target": f"images/{i // 1000:05d}/{i:08d}-t.jpg",
                    "category": f"kind-{i % 12}",
                    "weight": 1 + i % 3,
                }
                lines.append(json.dumps(row, ensure_ascii=False))
            file.write("\n".join(lines) + "\n")


def measure(name: str, manifest: Path, folder: Path) -> Measured:
    """Open the manifest in a new process."""
    done = run_watched(
        "benchmarks.manifests.contestants", [name, str(manifest), str(folder)], ("RssAnon", "RssFile"), every=0.01
    )
    if done.status:
        raise RuntimeError(f"{name} failed: {done.errors[-2000:]}")
    found = json.loads(done.output.strip().splitlines()[-1])
    return Measured(
        found["open"],
        found["look_up"],
        found["processor"],
        done.peaks["RssAnon"],
        done.peaks["RssFile"],
        found["check"],
    )


def main() -> int:
    """Measure, and print a table in Markdown."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="10 million rows need 2.4 GB, and 6 GB for the contestants")
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000, 1_000_000, 10_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parsed = parser.parse_args()
    parsed.folder.mkdir(parents=True, exist_ok=True)
    head = ("rows", "", "first open, s", "processor s", "rows a processor s", "again, s", "10,000 rows at random, s",
            "MiB anonymous, first", "MiB anonymous, again", "MiB mapped, again", "MiB left on disk")  # fmt: skip
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head), flush=True)
    for rows in parsed.rows:
        manifest = parsed.folder / f"{rows}.jsonl"
        if not manifest.exists():
            make_manifest(manifest, rows)
        first: dict[str, list[Measured]] = {name: [] for name in CONTESTANTS}
        again: dict[str, list[Measured]] = {name: [] for name in CONTESTANTS}
        left: dict[str, float] = {}
        for _ in range(parsed.rounds):
            for name in CONTESTANTS:
                folder = parsed.folder / f"made-by-{name}"
                shutil.rmtree(folder, ignore_errors=True)
                first[name].append(measure(name, manifest, folder))
                again[name].append(measure(name, manifest, folder))
                left[name] = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) / 2**20
                shutil.rmtree(folder)
        assert len({m.check for found in first.values() for m in found}) == 1, "both gave the same rows"
        for name in CONTESTANTS:
            opened = statistics.median(m.open for m in first[name])
            worked = statistics.median(m.processor for m in first[name])
            values = [
                f"{rows:,}", name, f"{opened:.2f}", f"{worked:.2f}", f"{rows / worked:,.0f}",
                f"{statistics.median(m.open for m in again[name]):.2f}",
                f"{statistics.median(m.look_up for m in again[name]):.2f}",
                *(f"{max(getattr(m, key) for m in found):.0f}"
                  for found, key in ((first[name], "anonymous"), (again[name], "anonymous"), (again[name], "mapped"))),
                f"{left[name]:,.0f}",
            ]  # fmt: skip
            print("| " + " | ".join(values) + " |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
