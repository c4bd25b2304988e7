"""The real training command on a few processes, forked from one that has the heavy imports already."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.ranks import free_port

PRELOAD = ["torch", "torch.distributed.fsdp", "diffusers", "transformers", "peft", "qwen_edit_zero.training.run"]
_context: Any = None


def _forkserver() -> Any:
    global _context
    if _context is None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(PRELOAD)
    return _context


def recipe(folder: Path, *, name: str, max_steps: int, **checkpoint: Any) -> list[str]:
    """Arguments of a small run on the demo's pictures: fp32, 24 samples, steps of a fraction of a second."""
    given = {
        "run.name": name, "run.dir": folder, "run.max_steps": max_steps, "run.tensorboard": "false",
        "data.max_samples": 24, "data.cache_dir": folder / "cache", "data.vae_area": 128 * 128,
        "data.condition_area": 56 * 56, "batch.global_size": 4, "batch.micro_size": 1, "precision": "fp32",
        "optimizer.lr": 1e-3, "sampling.count": 0, "schedule.kind": "constant",
        "schedule.warmup_steps": 0, "schedule.final_fraction": 0,
    }  # fmt: skip
    given |= {f"checkpoint.{key}": value for key, value in checkpoint.items()}
    return [
        "--engine",
        "fsdp2",
        *(f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in given.items()),
    ]


@dataclass
class Job:
    """Ranks of one training command, started together."""

    arguments: list[str]
    log: Path
    ranks: int = 2
    processes: list[BaseProcess] = field(default_factory=list)

    def start(self) -> None:
        """Start every rank; returns at once."""
        port = free_port()
        for rank in range(self.ranks):
            process = _forkserver().Process(target=_train, args=(rank, self.ranks, port, self.arguments, str(self.log)))
            process.start()
            self.processes.append(process)

    def kill(self, ranks: list[int]) -> None:
        """SIGKILL these ranks."""
        for rank in ranks:
            self.processes[rank].kill()

    def wait(self, seconds: float) -> list[int | None]:
        """Exit codes of the ranks; None for one that still runs after so many seconds."""
        for process in self.processes:
            process.join(seconds)
        return [process.exitcode for process in self.processes]

    @property
    def alive(self) -> bool:
        """Whether any rank runs."""
        return any(process.is_alive() for process in self.processes)


def _train(rank: int, ranks: int, port: int, arguments: list[str], log: str) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1",
    )  # fmt: skip
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    import torch

    from qwen_edit_zero.train import main

    torch.set_num_threads(1)
    sys.exit(main(arguments))


def recorded(run: Path) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm of every step in metrics.jsonl. Asserts that no step is there twice."""
    path = run / "metrics.jsonl"
    steps: dict[int, tuple[float, float]] = {}
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            if line.endswith("\n"):  # else a line being written
                values = json.loads(line)
                assert values["step"] not in steps, f"step {values['step']} is in {path} twice"
                steps[values["step"]] = (values["loss"], values["grad_norm"])
    return steps
