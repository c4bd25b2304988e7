"""How long a save holds up training, and how much slower steps are while it is written: ours, DCP, DeepSpeed.

Every contender saves the same state (fp32 weights and both moments), synced to disk, after a real step; contenders take
turns, round by round.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.tensor import DTensor

from benchmarks.engines import problem
from benchmarks.engines.tables import Table
from qwen_edit_zero.checkpoints.manifest import ModelReference
from qwen_edit_zero.checkpoints.writer import Contents
from qwen_edit_zero.engines.base import ParallelEngine
from qwen_edit_zero.settings.models import CheckpointSettings
from qwen_edit_zero.training.saving import CheckpointHook
from qwen_edit_zero.training.task import EditTask
from tests.ranks import run_ranks

CONFIG = problem.transformer_config(width=640, layers=4)
RANKS, ROUNDS = 2, 7
MODEL = ModelReference(path="tiny", fingerprint="f", config={})


class _Ours:
    """The hook that a run uses."""

    def __init__(self, engine: ParallelEngine, folder: Path, *, asynchronous: bool) -> None:
        settings = CheckpointSettings(every=1, keep=None, asynchronous=asynchronous)
        describe = lambda metrics, recorded: Contents(metrics.step, {}, {}, MODEL, engine.name, recorded)  # noqa: E731
        self._folder, self._hook = folder, CheckpointHook(engine, folder, settings, describe, lambda _: None)

    def save(self, step: int) -> None:
        metrics: Any = SimpleNamespace(step=step, loss=1.0, skipped=False)
        self._hook.after_step(metrics, is_last=False)

    def busy(self) -> bool:
        flight = self._hook._flight
        return flight is not None and not flight.result.done()

    def finish(self) -> None:
        if self._hook._flight is not None:
            self._hook._land()


class _Dcp:
    """torch.distributed.checkpoint, each rank its file."""

    def __init__(self, engine: Any, folder: Path, *, asynchronous: bool) -> None:
        self._engine, self._folder, self._asynchronous = engine, folder, asynchronous
        self._writing: Any = None
        self._group = dist.new_group(backend="gloo")  # its thread and training would mix their collectives else

    def save(self, step: int) -> None:
        state = self._state()
        path = self._folder / f"{step}"
        if self._asynchronous:
            self._writing = dcp.async_save(state, checkpoint_id=path, process_group=self._group)
        else:
            dcp.save(state, checkpoint_id=path)

    def _state(self) -> dict[str, Any]:
        """Weights and moments as sharded tensors, which is what DCP takes."""
        state: dict[str, Any] = {}
        for shard in self._engine._shards():
            whole = dict(self._engine.module.named_parameters())[shard.name]
            state[f"param.{shard.name}"] = whole
            for kind, moment in shard.moments.items():
                local = moment.view(whole.to_local().shape)
                state[f"{kind}.{shard.name}"] = DTensor.from_local(
                    local, whole.device_mesh, whole.placements, shape=whole.shape, stride=whole.stride()
                )
        return state

    def busy(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def finish(self) -> None:
        if self._writing is not None:
            self._writing.result()


class _DeepSpeed:
    """DeepSpeed's own save_checkpoint, which does not sync; so each rank syncs what is there afterwards."""

    def __init__(self, engine: Any, folder: Path) -> None:
        self._engine, self._folder = engine, folder

    def save(self, step: int) -> None:
        self._engine._engine.save_checkpoint(str(self._folder), tag=f"{step}")
        for path in sorted((self._folder / f"{step}").iterdir())[dist.get_rank() :: dist.get_world_size()]:
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
        dist.barrier()

    def busy(self) -> bool:
        return False

    def finish(self) -> None:
        pass


def measure(rounds: int = ROUNDS) -> list[Table]:
    """Medians over rounds."""
    rows: list[list[object]] = []
    for kind in ("fsdp2", "zero2"):
        with tempfile.TemporaryDirectory() as folder:
            results, idle = run_ranks(_race, RANKS, kind, Path(folder), rounds, timeout=1800)[0]
        for name, (stalls, whole, steps, size) in results.items():
            during = "-" if not steps else f"{statistics.median(steps) / idle:.2f}"
            rows.append(
                [
                    kind,
                    name,
                    f"{size / 1e6:.0f}",
                    f"{1000 * statistics.median(stalls):.0f}",
                    f"{1000 * statistics.median(whole):.0f}",
                    during,
                ]
            )
    notes = (
        f"{RANKS} ranks on {os.cpu_count()} cores, a step of "
        f"{problem.sizes(CONFIG).whole / 1e6:.0f} M parameters; {rounds} rounds in turns, medians; all files synced to "
        "disk. Held up: how much later the next step begins. In all: until the checkpoint is whole. Steps meanwhile: "
        "their median time, divided by that of steps without a save."
    )
    columns = ["engine", "contender", "MB", "held up, ms", "in all, ms", "steps meanwhile, x"]
    return [Table("A save during training", columns, rows, notes)]


def _race(
    rank: int, world: int, kind: str, folder: Path, rounds: int
) -> tuple[dict[str, tuple[list[float], list[float], list[float], int]], float]:
    model = problem.model_folder(CONFIG)
    run = problem.settings(kind, precision="fp32", bucket=2_000_000)
    engine = problem.build(model, run)
    task = EditTask(model, run)

    def step() -> float:
        dist.barrier()
        began = time.perf_counter()
        for batch in problem.batches(0, rank, 1):
            problem.run_backward(engine, task, batch, is_last=True)
        engine.step(lr=1e-5)
        return time.perf_counter() - began

    contenders: dict[str, Callable[[Path], Any]] = {
        "ours, training waits": lambda path: _Ours(engine, path, asynchronous=False),
        "ours, training goes on": lambda path: _Ours(engine, path, asynchronous=True),
    }
    if kind == "fsdp2":
        contenders["DCP save"] = lambda path: _Dcp(engine, path, asynchronous=False)
        contenders["DCP async_save"] = lambda path: _Dcp(engine, path, asynchronous=True)
    else:
        contenders["DeepSpeed"] = lambda path: _DeepSpeed(engine, path)
    savers = {name: make(folder / str(i)) for i, (name, make) in enumerate(contenders.items())}
    results: dict[str, tuple[list[float], list[float], list[float], int]] = {name: ([], [], [], 0) for name in savers}
    idle = [step() for _ in range(4)][1:]
    for number in range(rounds + 1):  # the first warms up: memory, caches
        for i, (name, saver) in enumerate(savers.items()):
            idle.append(step())
            dist.barrier()
            began = time.perf_counter()
            saver.save(number)
            stall = time.perf_counter() - began
            meanwhile = []
            while _any(saver.busy()):
                meanwhile.append(step())
            saver.finish()
            dist.barrier()
            whole = time.perf_counter() - began
            size = sum(p.stat().st_size for p in (folder / str(i)).rglob("*") if p.is_file())
            dist.barrier()
            if number:
                results[name][0].append(stall)
                results[name][1].append(whole)
                results[name][2].extend(meanwhile[:-1])  # the last one was alone in part
                results[name] = (*results[name][:3], size)
            if rank == 0:
                for path in (folder / str(i)).iterdir():
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
            dist.barrier()
    engine.close()
    return results, statistics.median(idle)


def _any(mine: bool) -> bool:
    told = torch.tensor([float(mine)])
    dist.all_reduce(told)
    return bool(told.item())
