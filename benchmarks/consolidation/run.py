"""Consolidation against zero_to_fp32, dcp_to_torch_save and cp: seconds, peak memory, differing elements.

    python -m benchmarks.consolidation.run FOLDER [--layers 31] [--rounds 5] [--kinds zero1 zero2 zero3 dcp] [--cold]

Each round runs every contestant once, in turn, each in a new process; medians are told. Every contestant ends with
its bytes on the disk (fsync). `cp` copies a file as large as the fp32 weights. Warm: the source is in the page cache;
cold: it was dropped from it. Anonymous memory is sampled every 5 ms, the total is the kernel's high-water mark.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.watched import run_watched

MIB = 2**20


@dataclass
class Measured:
    """A run of a contestant: seconds without imports, seconds of the process, peaks in MiB."""

    seconds: float
    process_seconds: float
    anonymous: float
    total: float


def measure(name: str, source: Path, out: Path) -> Measured:
    """Run a contestant in a new process."""
    began = time.perf_counter()
    done = run_watched(
        "benchmarks.consolidation.contestants", [name, str(source), str(out)], ("RssAnon", "VmHWM"), every=0.005
    )
    if done.status != 0:
        raise SystemExit(f"{name} failed on {source}")
    seconds = float(next(line for line in done.output.splitlines() if line.startswith("seconds ")).split()[1])
    return Measured(seconds, time.perf_counter() - began, done.peaks["RssAnon"], done.peaks["VmHWM"])


def differing(found: Path, expected: Path, kind: str) -> int:
    """Elements of our fp32 weights that are not the other tool's."""
    import torch
    from safetensors.torch import load_file

    if kind == "dcp":
        right = torch.load(expected / "whole.pt")["model"]
    else:
        right = {k: t for p in expected.glob("*.safetensors") for k, t in load_file(p).items()}
    ours = {k: t for p in found.glob("*.safetensors") for k, t in load_file(p).items()}
    if ours.keys() != right.keys():
        raise SystemExit(f"{kind}: other tensors: {sorted(ours.keys() ^ right.keys())[:4]}")
    return sum(int((ours[k].view(torch.int32) != right[k].view(torch.int32)).sum()) for k in right)


def drop(path: Path) -> None:
    """Forget a folder's files in the page cache."""
    for file in [path, *path.rglob("*")]:
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def warm(path: Path) -> None:
    """Read a folder's files."""
    for file in [path, *path.rglob("*")]:
        if file.is_file():
            with file.open("rb", buffering=0) as opened:
                while opened.read(16 * MIB):
                    pass


def benchmark(kind: str, folder: Path, layers: int, rounds: int, *, cold: bool) -> None:
    """Make one folder, run all rounds on it, print its table, delete it."""
    source, results = folder / kind, folder / "results.jsonl"
    if not source.exists():
        subprocess.run(
            [sys.executable, "-m", "benchmarks.consolidation.make", str(source), kind, str(layers)],
            check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    other = "dcp_to_torch_save" if kind == "dcp" else "zero_to_fp32"
    names = ["bare", "cp", "ours-fp32", "ours-bf16", other]
    size = layers * (2048 * 2048 + 2048) * 4
    plain = folder / "plain"
    with plain.open("wb") as file:
        for _ in range(0, size, 16 * MIB):
            file.write(os.urandom(16 * MIB))
        file.truncate(size)
    runs: dict[str, list[Measured]] = {name: [] for name in names}
    wrong = -1
    for number in range(rounds):
        for name in names[number % len(names) :] + names[: number % len(names)]:
            place = plain if name == "cp" else source
            drop(place) if cold else warm(place)
            runs[name].append(measure(name, place, folder / f"out-{name}"))
            if wrong < 0 and all((folder / f"out-{n}").exists() for n in ("ours-fp32", other)):
                wrong = differing(folder / "out-ours-fp32", folder / f"out-{other}", kind)
            elif wrong >= 0 or name not in ("ours-fp32", other):
                shutil.rmtree(folder / f"out-{name}", ignore_errors=True)
        for name in names:
            shutil.rmtree(folder / f"out-{name}", ignore_errors=True) if wrong >= 0 else None
    bare = statistics.median(m.anonymous for m in runs["bare"])
    print(f"\n### {kind}, {size / 4e9:.2f} B parameters, {'cold' if cold else 'warm'}, {rounds} rounds, medians\n")
    print("| | seconds | with imports | anonymous MiB above bare Python | peak MiB in all |\n|---|---|---|---|---|")
    for name in names:
        if name != "bare":
            of = runs[name]
            cells = [statistics.median(getattr(m, key) for m in of) for key in ("seconds", "process_seconds")]
            peaks = [max(m.anonymous for m in of) - bare, max(m.total for m in of)]
            print(f"| {name} | {cells[0]:.2f} | {cells[1]:.2f} | {peaks[0]:.0f} | {peaks[1]:.0f} |")
    print(f"\nelements that differ from {other}: {wrong}", flush=True)
    with results.open("a") as log:
        log.write(json.dumps({"kind": kind, "layers": layers, "cold": cold, "wrong": wrong, "runs": {
            name: [vars(m) for m in of] for name, of in runs.items()}}) + "\n")  # fmt: skip


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=31, help="31: 0.13 B parameters; 119: 0.5 B")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", default=["zero1", "zero2", "zero3", "dcp"])
    parser.add_argument("--cold", action="store_true")
    parser.add_argument("--keep", action="store_true", help="keep the folders for another run")
    parsed = parser.parse_args()
    parsed.folder.mkdir(parents=True, exist_ok=True)
    for kind in parsed.kinds:
        benchmark(kind, parsed.folder, parsed.layers, parsed.rounds, cold=parsed.cold)
        if not parsed.keep:
            shutil.rmtree(parsed.folder / kind)


if __name__ == "__main__":
    main()
