"""The training that is disturbed: its command, its data with a bad sample, its steps, and its final state."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qwen_edit_zero.checkpoints.layout import checkpoint_folders, step_of
from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.edit_data.cache.shard import DTYPES, ShardWriter, read_records, strike

EVERY = 5  # steps between checkpoints


def command(cache: Path, run: Path, *, max_steps: int, engine: str) -> list[str]:
    """Arguments of a small run on the demo's pictures: fp32, 96 samples, 16 steps an epoch."""
    given: dict[str, Any] = {
        "run.name": run.name, "run.dir": run.parent, "run.max_steps": max_steps, "run.tensorboard": "false",
        "data.max_samples": 96, "data.cache_dir": cache, "data.vae_area": 128 * 128,
        "data.condition_area": 56 * 56, "batch.global_size": 6, "batch.micro_size": 1, "precision": "fp32",
        "optimizer.lr": 1e-3, "sampling.count": 0, "schedule.kind": "constant", "schedule.warmup_steps": 0,
        "schedule.final_fraction": 0, "checkpoint.every": EVERY, "checkpoint.keep": 2,
    }  # fmt: skip
    how = ["--ds", f"ds_configs/{engine}.json"] if engine.startswith("zero") else ["--engine", engine]
    return [*how, "--take-over", *(f"{key}={value}" for key, value in given.items())]


def spoil_a_sample(cache: Path) -> None:
    """Let one picture's latents be NaN, as a faulty device may have left them, with a checksum that fits.

    Does nothing to a cache that has one.
    """
    if any(cache.glob("latent-*/shards/*.bad")):
        return
    shard = next(path for path in sorted(cache.glob("latent-*/shards/*")) if path.suffix == ".safetensors")
    record = read_records(shard)[-1]
    key = record["key"].tobytes()
    shape = tuple(int(n) for n in record["shape"][: int(record["dims"])])
    strike(shard, key)
    with ShardWriter(shard.parent) as writer:
        writer.put(key, torch.full(shape, math.nan, dtype=DTYPES[int(record["dtype"])][1]))
    for index in shard.parent.parent.glob("index/*"):
        shutil.rmtree(index)


def last_step(run: Path) -> int:
    """The last step that was recorded; 0 if none was."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - 4096))
            lines = [line for line in file.read().split(b"\n")[:-1] if line.startswith(b"{")]
    except OSError:
        return 0
    return int(json.loads(lines[-1])["step"]) if lines else 0


def recorded(run: Path) -> dict[int, dict[str, Any]]:
    """The metrics of every step. Asserts that none is there twice, and none missing."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [row["step"] for row in rows]
    assert steps == list(range(1, len(steps) + 1)), "a step is missing, or there twice"
    return {row["step"]: row for row in rows}


def events(run: Path) -> list[dict[str, Any]]:
    """What happened to the run, by itself."""
    found = []
    for line in (run / "events.jsonl").read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:
            continue  # written while its process was killed
    return found


def newest_checkpoint(run: Path) -> Path | None:
    """The folder of the last checkpoint that is whole; None if there is none."""
    folders = checkpoint_folders(run / "checkpoints") if (run / "checkpoints").is_dir() else []
    return max(folders, key=lambda path: path.name, default=None)


def last_common_checkpoint(a: Path, b: Path) -> int:
    """The last step of which both runs have a checkpoint."""
    found = [{step_of(path) for path in checkpoint_folders(run / "checkpoints")} for run in (a, b)]
    return max(step for step in found[0] & found[1] if step is not None)


def keep(run: Path, folder: Path) -> None:
    """Copy a run's metrics, events and checkpoints."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(run / "checkpoints", folder / "checkpoints")
    for name in ("metrics.jsonl", "events.jsonl"):
        shutil.copy(run / name, folder / name)


def largest_difference(a: Path, b: Path) -> dict[str, float]:
    """The largest absolute difference of any element between two checkpoints, for weights and each moment."""
    worst: dict[str, float] = {}
    with CheckpointReader(a) as first, CheckpointReader(b) as second:
        for kind in first.kinds():
            assert sorted(first.names(kind)) == sorted(second.names(kind))
            for name in first.names(kind):
                size = int(np.prod(first.shape(name, kind)))
                one, other = (reader.read(name, 0, size, kind) for reader in (first, second))
                gap = (one.double() - other.double()).abs().max().item() if size else 0.0
                worst[kind] = max(worst.get(kind, 0.0), gap)
    return worst
