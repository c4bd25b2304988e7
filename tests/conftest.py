"""A small data set out of the demo's, and a cache that all runs of the session share."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from hypothesis import settings as hypothesis_settings

from qwen_edit_zero.assets import demo_manifest

hypothesis_settings.register_profile("any machine", deadline=None)  # tests assert no timing
hypothesis_settings.load_profile("any machine")


_LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
_MEETING = ("MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")


@pytest.fixture(autouse=True)
def environment_of_no_launcher() -> Iterator[None]:
    """Take back what a test sets in its own process; a process group, also one of a shared fixture, leaves variables
    that later launches would take for their own."""
    for name in (*_LAUNCHERS, *_MEETING):
        os.environ.pop(name, None)
    before = dict(os.environ)
    yield
    if dict(os.environ) != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(scope="session")
def small_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A manifest of 18 demo samples with one, two and three references; pictures are links."""
    demo = demo_manifest("train")
    folder = tmp_path_factory.mktemp("data")
    (folder / "images").symlink_to(demo.parent / "images")
    rows = [json.loads(line) for line in demo.read_text(encoding="utf-8").splitlines()]

    def references(row: dict[str, object]) -> int:
        return 1 if isinstance(row["source"], str) else len(row["source"])  # type: ignore[arg-type]

    chosen = [row for n in (1, 2, 3) for row in [r for r in rows if references(r) == n][: 10 - 3 * (n - 1)]]
    manifest = folder / "small.jsonl"
    manifest.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in chosen), encoding="utf-8")
    return manifest


@pytest.fixture(scope="session")
def recipe(small_data: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A recipe for quick, comparable runs: fp32, a constant lr, two small sampled pictures at the end."""
    folder = tmp_path_factory.mktemp("recipe")
    settings = {
        "run": {"name": "small", "max_steps": 4},
        "model": {"path": "tiny", "activation_checkpointing": "none"},
        "data": {
            "manifest": str(small_data),
            "validation": "demo",
            "cache_dir": str(folder / "cache"),
            "vae_area": 128 * 128,
            "condition_area": 56 * 56,
        },
        "batch": {"global_size": 4, "micro_size": 1},
        "optimizer": {"lr": 1e-3},
        "precision": "fp32",
        "checkpoint": {"every": 2},
        "sampling": {"count": 2, "steps": 2, "guidance": 1.0},
    }
    path = folder / "small.yaml"
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return str(path)
