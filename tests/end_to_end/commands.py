"""Starting the real commands as a user does, and looking at what they leave behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ranks import free_port

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
TRAIN = str(ROOT / "qwen_edit_zero" / "train.py")
LAUNCHERS = {
    "python": [sys.executable, TRAIN],
    "torchrun": [str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", "PORT", TRAIN],
    "deepspeed": [
        str(BIN / "deepspeed"),
        "--hostfile",
        str(ROOT / "hostfiles" / "localhost"),
        "--master_port",
        "PORT",
        TRAIN,
    ],
    "console": [str(BIN / "qwen-edit-zero"), "train"],
}
ENGINE = {
    "ddp": ["--engine", "ddp"],
    "fsdp2": ["--engine", "fsdp2"],
    "zero1": ["--ds", "ds_configs/zero1.json"],
    "zero2": ["--ds", "ds_configs/zero2.json"],
    "zero3": ["--ds", "ds_configs/zero3.json"],
}


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    output: str
    error: str
    seconds: float

    @property
    def text(self) -> str:
        """Everything it printed."""
        return self.output + self.error


def run(launcher: str, *arguments: str, cwd: Path, timeout: float = 240.0) -> Ended:
    """Run a training command to its end, one thread a rank; processes left behind would hold the pipes and time out."""
    command = [str(free_port()) if word == "PORT" else word for word in LAUNCHERS[launcher]] + list(arguments)
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    environment |= {"OMP_NUM_THREADS": "1"}
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=timeout, check=False
    )
    return Ended(done.returncode, done.stdout, done.stderr, time.monotonic() - began)


def metrics(run_folder: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]


def losses(run_folder: Path) -> list[float]:
    """The loss of each step."""
    return [m["loss"] for m in metrics(run_folder)]
