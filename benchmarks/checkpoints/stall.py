"""What a save costs training: ours while training waits and in the background, torch DCP, DeepSpeed.

Contenders that save the same engine's state take turns, round by round, in one process group. Each has a model of its
own that takes real optimizer steps before, and (in the background) while the checkpoint is written.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.checkpoints.peers import Dcp, DeepSpeed, folder_bytes
from benchmarks.engines import problem
from benchmarks.engines.tables import Table
from qwen_edit_zero.checkpoints.manifest import ModelReference
from qwen_edit_zero.checkpoints.writer import Contents
from qwen_edit_zero.edit_data.batches.batch import EditBatch
from qwen_edit_zero.engines.base import ParallelEngine
from qwen_edit_zero.settings.models import CheckpointSettings
from qwen_edit_zero.training.saving import CheckpointHook
from qwen_edit_zero.training.task import EditTask
from tests.ranks import run_ranks

CONFIG = problem.transformer_config(width=640, layers=5)
KINDS = ("fsdp2", "zero2", "zero3")
RANKS, ROUNDS, EVERY, IDLE = 2, 5, 1000, 3
LATENT = 8  # a side of target and reference: short samples, so that several steps fit into a save
MODEL = ModelReference(path="tiny", fingerprint="f", config={})
MB = 1e6

Save = Callable[[int, Path], "Future[Any] | None"]


@dataclass
class _Contender:
    """`step(number)` takes an optimizer step; `save(number, folder)` returns the future of what goes on behind."""

    step: Callable[[int], object]
    save: Save
    finish: Callable[[], object] = lambda: None


@dataclass
class _Found:
    """Seconds of each round, the largest over ranks; bytes of the last."""

    held_up: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    lost: list[float] = field(default_factory=list)
    idle: list[float] = field(default_factory=list)
    meanwhile: list[float] = field(default_factory=list)
    size: int = 0


def measure(rounds: int = ROUNDS, config: dict[str, Any] = CONFIG) -> list[Table]:
    """Medians over rounds, for each engine."""
    rows: list[list[object]] = []
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(_race, RANKS, kind, Path(folder), rounds, config, timeout=3000)[0]
        for name, f in found.items():
            idle = statistics.median(f.idle)
            rows.append(
                [
                    kind,
                    name,
                    f"{f.size / MB:,.0f}",
                    f"{statistics.median(f.held_up):.2f}",
                    f"{statistics.median(f.durable):.2f}",
                    f"{idle:.2f}",
                    f"{statistics.median(f.meanwhile) / idle:.2f} ({len(f.meanwhile)})" if f.meanwhile else "-",
                    f"{statistics.median(f.lost):.2f}",
                ]
            )
    notes = (
        f"{RANKS} gloo ranks on {os.cpu_count()} cores, {problem.sizes(config).whole / 1e6:.0f} M parameters (N), all "
        f"trained; one file system; medians of {rounds} rounds after one that warms up, contenders of an engine in "
        "turns. Every file is on the disk (fsync) at the end of each time; DeepSpeed syncs nothing by itself, so the "
        "ranks sync its files inside the timed part. All write fp32 weights and two fp32 moments, 12 N; DeepSpeed's "
        "stage 2 writes the bf16 weights, too, 14 N. Ours computes checksums while it writes; the others have none but "
        "the CRC-32 of torch's zip files. Held up: from the call to its return, when the next step may begin. Durable: "
        "from the call until the checkpoint is whole on the disk. Slower steps: median time of those that lie in whole "
        "within the writing (their number), over that of steps without. Lost in all: the time of everything from the "
        "call to the end of the step in which the writing ended, less as many undisturbed steps."
    )
    columns = [
        "engine",
        "contender",
        "MB",
        "held up, s",
        "durable, s",
        "a step, s",
        "slower steps, x",
        "lost in all, s",
    ]
    return [Table("A save during training", columns, rows, notes)]


def _race(rank: int, world: int, kind: str, folder: Path, rounds: int, config: dict[str, Any]) -> dict[str, _Found]:
    contenders = _contenders(kind, config, folder)
    found: dict[str, _Found] = defaultdict(_Found)
    for number in range(rounds + 1):
        for i, (name, contender) in enumerate(contenders.items()):
            place = folder / str(i)
            _one_save(contender, (10 * number + i) * EVERY, place, found[name] if number else _Found())
            if rank == 0:
                for path in place.iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
                os.sync()  # no deletion lags into the next turn
            dist.barrier()
    return dict(found)


def _one_save(contender: _Contender, number: int, place: Path, found: _Found) -> None:
    for step in range(1, IDLE + 1):
        dist.barrier()
        began = time.perf_counter()
        contender.step(number - EVERY + step)
        found.idle.append(_largest(time.perf_counter() - began))
    dist.barrier()
    began = time.perf_counter()
    future = contender.save(number, place)
    held_up = time.perf_counter() - began
    ended = [began + held_up]
    steps: list[tuple[float, float]] = []
    if future is not None:
        ended.clear()
        future.add_done_callback(lambda _: ended.append(time.perf_counter()))
        while not _all_ranks(bool(ended)):
            step_began = time.perf_counter()
            contender.step(number + 1 + len(steps))
            steps.append((step_began, time.perf_counter()))
        future.result()
    through = time.perf_counter()
    durable = _largest(ended[0] - began)
    found.held_up.append(_largest(held_up))
    found.durable.append(durable)
    found.meanwhile += [_largest(end - start) for start, end in steps if _largest(end - began) <= durable]
    found.lost.append(_largest(through - began) - len(steps) * statistics.median(found.idle))
    contender.finish()
    dist.barrier()
    found.size = folder_bytes(place)


def _contenders(kind: str, config: dict[str, Any], folder: Path) -> dict[str, _Contender]:
    model = problem.model_folder(config)
    run = problem.settings(kind, bucket=2_000_000)
    engine = problem.build(model, run)
    batch = _batch()
    task = EditTask(model, run)
    made = {
        "ours, training waits": _ours(engine, task, batch, folder / "0", asynchronous=False),
        "ours, in the background": _ours(engine, task, batch, folder / "1", asynchronous=True),
    }
    if kind == "fsdp2":
        torch_dcp = Dcp(model, run)

        def step_dcp(number: int) -> None:
            torch_dcp.step(number, [batch])

        made["DCP save"] = _Contender(step_dcp, lambda number, place: torch_dcp.save(place / str(number)))
        made["DCP async_save"] = _Contender(step_dcp, lambda number, place: torch_dcp.begin_save(place / str(number)))
    else:
        deepspeed = DeepSpeed(model, run, int(kind[-1]))
        made["DeepSpeed save_checkpoint"] = _Contender(
            lambda number: deepspeed.step(number, [batch]), lambda number, place: deepspeed.save(place / str(number))
        )
    return made


def _ours(engine: ParallelEngine, task: EditTask, batch: EditBatch, folder: Path, *, asynchronous: bool) -> _Contender:
    """The hook that a run uses, told of every step."""
    settings = CheckpointSettings(every=EVERY, keep=None, asynchronous=asynchronous)

    def describe(metrics: Any, recorded: Any) -> Contents:
        return Contents(metrics.step, {}, {}, MODEL, engine.name, recorded)

    hook = CheckpointHook(engine, folder, settings, describe, lambda _: None)

    def tell(number: int) -> None:
        metrics: Any = SimpleNamespace(step=number, loss=1.0, skipped=False)
        hook.after_step(metrics, is_last=False)

    def step(number: int) -> None:
        problem.run_backward(engine, task, batch, is_last=True)
        engine.step(lr=1e-5)
        tell(number)

    def save(number: int, place: Path) -> Future[Path] | None:
        tell(number)
        return hook._flight.result if hook._flight else None

    def finish() -> None:
        if hook._flight:  # else the next step would learn of it
            hook._land()

    return _Contender(step, save, finish)


def _batch() -> EditBatch:
    generator = torch.Generator().manual_seed(dist.get_rank())
    latents = [torch.randn(1, 16, LATENT, LATENT, generator=generator) for _ in range(2)]
    return EditBatch(
        target_latents=latents[0],
        reference_latents=(latents[1],),
        prompt_embeds=torch.randn(1, problem.TEXT, 192, generator=generator),
        prompt_mask=None,
        weights=torch.ones(1),
        sample_ids=("s",),
        epoch=0,
    )


def _all_ranks(mine: bool) -> bool:
    told = torch.tensor([float(mine)])
    dist.all_reduce(told)
    return int(told) == dist.get_world_size()


def _largest(seconds: float) -> float:
    told = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(told, op=dist.ReduceOp.MAX)
    return told.item()
