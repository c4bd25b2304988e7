"""A small run that every launcher repeats on the nodes, and what must be true of it afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.cluster.lab.nodes import Ended, Nodes
from tests.end_to_end.commands import ROOT, metrics, run

TRAIN = "qwen_edit_zero/train.py"
ZERO2 = ["--ds", "ds_configs/zero2.json"]


@dataclass(frozen=True)
class Reference:
    """A single process's run of three steps: its recipe, and the folder in which others are put beside it."""

    recipe: str
    folder: Path

    def arguments(self, name: str) -> list[str]:
        """What makes a training command repeat it as a run called `name`."""
        return [self.recipe, f"run.dir={self.folder}", f"run.name={name}"]

    def check(self, name: str, *, like: str = "single") -> None:
        """Assert that the run `name` had the losses and gradient norms of the run `like`, of a single process."""
        of, to = (metrics(self.folder / run_name) for run_name in (name, like))
        assert [m["loss"] for m in of] == pytest.approx([m["loss"] for m in to], rel=1e-5)
        assert [m["grad_norm"] for m in of] == pytest.approx([m["grad_norm"] for m in to], rel=1e-4)
        assert len(of) == 3


def make_reference(recipe: str, folder: Path) -> Reference:
    """Cut the recipe down to three steps without pictures, run it in one process, and leave a warm cache."""
    settings = yaml.safe_load(Path(recipe).read_text(encoding="utf-8"))
    settings["run"] |= {"max_steps": 3, "tensorboard": False}
    settings["sampling"]["count"] = 0
    settings["checkpoint"] = {"every": None}
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    ended = run("python", "--engine", "ddp", str(path), f"run.dir={folder}", "run.name=single", cwd=ROOT)
    assert ended.status == 0, ended.text
    return Reference(str(path), folder)


def assert_good(nodes: Nodes, ended: Ended) -> None:
    """Assert that a command ended well, without a traceback, and left no process on any node."""
    assert ended.status == 0, ended.text
    assert "Traceback" not in ended.text, ended.text
    assert not nodes.left()
