"""The tools: how each starts a job on the nodes, what it leaves behind, and how that is read."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.cluster.lab.nodes import Nodes

ROOT = Path(__file__).resolve().parents[2]
JOBS = Path(__file__).parent / "jobs"
BIN = Path(sys.executable).parent
NODES = ("node1", "node2")
JOB_FILE = "/run/job.yaml"  # each node has its own /run; JSON is YAML
SETTINGS = {"lr": 1e-3, "steps": 20, "every": 6, "global_batch": 4}


@dataclass(frozen=True)
class Trained:
    """A step that a start of a job has done: `samples` is None where the tool's log does not tell."""

    start: str
    step: int
    loss: float
    samples: tuple[int, ...] | None


@dataclass(frozen=True)
class Weights:
    """Digests of the weights that ranks ended with, and whether they are finite."""

    digests: tuple[str, ...]
    finite: bool


@dataclass(frozen=True)
class Tool:
    """A way to train, and its launcher."""

    name: str
    title: str
    launcher: str  # torchrun, accelerate or deepspeed
    script: str
    packages: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    resumes_from: str = ""  # the file that a resumed start reads, where that is not the newest

    def versions(self) -> dict[str, str]:
        """Of the packages that matter."""
        return {package: importlib.metadata.version(package) for package in self.packages}

    def settings(self, folder: Path, **changed: Any) -> str:
        """The contents of the job's file of settings."""
        return json.dumps({**SETTINGS, **changed})

    def arguments(self, folder: Path) -> list[str]:
        """The script and its arguments."""
        return [str(JOBS / self.script), f"{folder}/run", JOB_FILE]

    def commands(
        self, nodes: Nodes, folder: Path, *, ranks: int, port: int, restarts: int, nan: bool = False
    ) -> dict[str, list[str]]:
        """The command to type on each node."""
        address, script = nodes.address(NODES[0]), self.arguments(folder)
        if self.launcher == "deepspeed":
            hostfile = folder / "hostfile"
            hostfile.write_text("".join(f"{name} slots=1\n" for name in NODES[:ranks]), encoding="utf-8")
            command = [str(BIN / "deepspeed"), "--hostfile", str(hostfile), "--master_port", str(port)]
            command += ["--master_addr", address] + (["--force_multi"] if ranks == 1 else [])
            return {NODES[0]: [*command, *script]}
        return {
            name: [*self._agent(address, i, ranks, port, restarts), *script] for i, name in enumerate(NODES[:ranks])
        }

    def _agent(self, address: str, number: int, ranks: int, port: int, restarts: int) -> list[str]:
        meeting = ["--rdzv_backend", "c10d", "--max_restarts", str(restarts)]
        if self.launcher == "accelerate":
            how = ["--multi_gpu", "--main_process_ip", address, "--main_process_port", str(port)]
            counts = ["--num_machines", str(ranks), "--num_processes", str(ranks), "--machine_rank", str(number)]
            plain = ["--mixed_precision", "no", "--dynamo_backend", "no"]
            if ranks == 1:
                return [
                    str(BIN / "accelerate"),
                    "launch",
                    "--cpu",
                    "--num_machines",
                    "1",
                    "--num_processes",
                    "1",
                    *plain,
                ]
            return [str(BIN / "accelerate"), "launch", *how, *counts, *plain, *meeting]
        where = ["--rdzv_endpoint", f"{address}:{port}", "--rdzv_id", str(port), "--nproc_per_node", "1"]
        return [str(BIN / "torchrun"), "--nnodes", str(ranks), *meeting, *where]

    def checkpoints(self, folder: Path) -> Path:
        """The folder that checkpoints are in."""
        return folder / "run" / "checkpoints"

    def trained(self, folder: Path) -> list[Trained]:
        """Steps done by all starts, in the order in which rank 0 did them; samples over all ranks."""
        by_rank: dict[tuple[int, int], list[int]] = {}
        files = sorted((folder / "run").glob("trained-*.jsonl"))
        lines = [[json.loads(line) for line in _whole_lines(file)] for file in files]
        found = []
        for others in lines[1:]:
            seen: dict[int, int] = {}
            for line in others:  # the same step of the same try
                seen[line["step"]] = seen.get(line["step"], 0) + 1
                by_rank.setdefault((line["step"], seen[line["step"]]), []).extend(line["ids"])
        tries: dict[int, int] = {}
        for line in lines[0] if lines else []:
            tries[line["step"]] = tries.get(line["step"], 0) + 1
            ids = [*line["ids"], *by_rank.get((line["step"], tries[line["step"]]), [])]
            found.append(Trained(line["start"], line["step"], line["loss"], tuple(sorted(ids))))
        return found

    def weights(self, folder: Path) -> Weights | None:
        """What the ranks ended with; None if they did not get there."""
        found = [json.loads(file.read_text()) for file in sorted((folder / "run").glob("ended-*.json"))]
        return Weights(tuple(f["digest"] for f in found), all(f["finite"] for f in found)) if found else None

    def forget_end(self, folder: Path) -> None:
        """So that a later start's end is not taken for an earlier one's."""
        for file in (folder / "run").glob("ended-*.json"):
            file.unlink()


@dataclass(frozen=True)
class Ours(Tool):
    """The real training command on the tiny model of the same classes as Qwen-Image-Edit."""

    cache: Path = Path("cache")
    engine: Sequence[str] = ()

    def settings(self, folder: Path, **changed: Any) -> str:
        given = {**SETTINGS, **changed}
        return yaml.safe_dump(
            {
                "run": {"name": "run", "dir": str(folder), "max_steps": given["steps"], "tensorboard": False},
                "data": {
                    "max_samples": 40, "cache_dir": str(self.cache), "vae_area": 128 * 128, "condition_area": 56 * 56,
                },
                "batch": {"global_size": given["global_batch"]}, "optimizer": {"lr": given["lr"]}, "precision": "fp32",
                "checkpoint": {"every": given["every"]}, "sampling": {"count": 0},
            }
        )  # fmt: skip

    def arguments(self, folder: Path) -> list[str]:
        return [str(ROOT / "qwen_edit_zero" / "train.py"), JOB_FILE, *self.engine, f"run.dir={folder}/"]

    def commands(
        self, nodes: Nodes, folder: Path, *, ranks: int, port: int, restarts: int, nan: bool = False
    ) -> dict[str, list[str]]:
        commands = super().commands(nodes, folder, ranks=ranks, port=port, restarts=restarts)
        if nan:
            old, new = self.arguments(folder)[0], str(JOBS / "ours_nan.py")
            commands = {name: [new if word == old else word for word in words] for name, words in commands.items()}
        return commands

    def trained(self, folder: Path) -> list[Trained]:
        lines = [json.loads(line) for line in _whole_lines(folder / "run" / "metrics.jsonl")]
        return [Trained("", line["step"], line["loss"], None) for line in lines]

    def weights(self, folder: Path) -> Weights | None:
        import torch

        from qwen_edit_zero.checkpoints.reader import CheckpointReader
        from qwen_edit_zero.flat_state import PARAM

        final = self.checkpoints(folder) / f"step-{SETTINGS['steps']:08d}"
        if not final.is_dir():
            return None
        digest, finite = hashlib.sha256(), True
        with CheckpointReader(final) as reader:
            for name in sorted(reader.names(PARAM)):
                for piece in reader.stream(name, PARAM):
                    content = bytes(piece)
                    digest.update(content)
                    finite = finite and bool(torch.frombuffer(bytearray(content), dtype=torch.float32).isfinite().all())
        return Weights((digest.hexdigest(),), finite)

    def forget_end(self, folder: Path) -> None:
        """A later start finds out by itself what is done."""

    def resumed_at(self, folder: Path) -> int:
        """The step that the newest start went on from."""
        step = 0
        for line in _whole_lines(folder / "run" / "events.jsonl"):
            event = json.loads(line)
            if event["event"] == "start":
                step = 0
            elif event["event"] == "resumed":
                step = event["step"]
        return step


def all_tools(scratch: Path, lightning: Path | None) -> dict[str, Tool]:
    """Every tool by name; Lightning's packages may lie in a folder of their own."""
    beside = {"PYTHONPATH": str(lightning)} if lightning else {}
    compiled = {"TORCH_EXTENSIONS_DIR": str(scratch / "torch_extensions")}  # DeepSpeed's, once for all its jobs
    ours = {"cache": scratch / "cache"}
    tools = [
        Tool("torchrun", "torchrun + DDP", "torchrun", "torchrun_ddp.py", ("torch",)),
        Tool("accelerate", "accelerate", "accelerate", "accelerated.py", ("accelerate",)),
        Tool("lightning", "Lightning", "torchrun", "lightning_trainer.py", ("lightning",), beside, "last.ckpt"),
        Tool("deepspeed", "DeepSpeed", "deepspeed", "deepspeed_engine.py", ("deepspeed",), compiled),
        Ours("ours", "this project, torchrun", "torchrun", "", ("qwen-edit-zero",), engine=("--engine", "ddp"), **ours),
        Ours(
            "ours_deepspeed", "this project, deepspeed", "deepspeed", "", ("qwen-edit-zero",),
            compiled, engine=("--ds", str(ROOT / "ds_configs" / "zero2.json")), **ours,
        ),
    ]  # fmt: skip
    return {tool.name: tool for tool in tools}


def _whole_lines(path: Path) -> list[str]:
    """Lines that are written to their end."""
    if not path.exists():
        return []
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
