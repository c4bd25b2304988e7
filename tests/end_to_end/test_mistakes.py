"""A user's mistake: one clear message, exit status 2, no traceback, and every process gone within seconds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.end_to_end.commands import Ended, run


def tiny_copy(to: Path) -> Path:
    from qwen_edit_zero.edit_model.tiny import materialise_tiny_model

    return Path(shutil.copytree(materialise_tiny_model(), to / "model"))


def without_a_shard(to: Path) -> list[str]:
    model = tiny_copy(to)
    next(iter((model / "transformer").glob("*-00002-of-*.safetensors"))).unlink()
    return [f"model.path={model}"]


def without_scheduler(to: Path) -> list[str]:
    model = tiny_copy(to)
    (model / "scheduler" / "scheduler_config.json").unlink()
    return [f"model.path={model}"]


def another_family(to: Path) -> list[str]:
    model = tiny_copy(to)
    (model / "model_index.json").write_text(json.dumps({"_class_name": "FluxPipeline"}))
    return [f"model.path={model}"]


def unreadable_recipe(to: Path) -> list[str]:
    (to / "recipe.yaml").write_bytes(b"run: [\xff")
    return [str(to / "recipe.yaml")]


def empty_data(to: Path) -> list[str]:
    (to / "empty.jsonl").write_text("\n")
    return [f"data.manifest={to / 'empty.jsonl'}"]


def run_folder_is_a_file(to: Path) -> list[str]:
    (to / "taken").write_text("")
    return ["run.name=taken"]


MISTAKES: dict[str, tuple[Callable[[Path], list[str]], str]] = {
    "no such model": (lambda to: ["model.path=/nowhere/model"], "/nowhere/model"),
    "a shard is missing": (without_a_shard, "-00002-of-"),
    "a file is missing": (without_scheduler, "scheduler/scheduler_config.json"),
    "another family": (another_family, "FluxPipeline"),
    "unreadable recipe": (unreadable_recipe, "recipe.yaml"),
    "no such recipe": (lambda to: ["recipes/dmeo.yaml"], "recipes/demo.yaml"),
    "unknown key": (lambda to: ["optimizer.weight_deacy=1"], "weight_decay"),
    "unknown section": (lambda to: ["optimiser.lr=1"], "optimizer"),
    "empty data set": (empty_data, "empty.jsonl"),
    "gpu demanded without one": (lambda to: ["engine.device=cuda"], "no GPU"),
    "run folder is a file": (run_folder_is_a_file, "taken"),
    "freeze pattern matches nothing": (lambda to: ["model.freeze=[transformer_block.*]"], "transformer_block.*"),
}


def assert_plain(ended: Ended, expected: str) -> None:
    assert ended.status == 2, ended.text
    assert expected in ended.error
    assert ended.error.count("error: ") == 1, ended.error
    assert "Traceback" not in ended.text, ended.error


@pytest.mark.parametrize("name", MISTAKES)
def test_a_single_process_says_what_is_wrong_and_ends_with_2(name: str, tmp_path: Path, recipe: str) -> None:
    make, expected = MISTAKES[name]
    given = make(tmp_path)
    if "=" in given[0]:
        given = [recipe, *given]
    assert_plain(run("python", *given, "--engine", "ddp", f"run.dir={tmp_path}", cwd=tmp_path), expected)


@pytest.mark.parametrize(
    ("name", "arguments", "expected"),
    [
        ("before the ranks meet", ["batch.global_size=3"], "batch.global_size 3"),
        ("after the ranks met", ["data.manifest=/nowhere.jsonl"], "/nowhere.jsonl"),
    ],
)
def test_under_deepspeed_one_rank_speaks_and_all_end(
    name: str, arguments: list[str], expected: str, tmp_path: Path
) -> None:
    ended = run("deepspeed", "--ds", "ds_configs/zero2.json", f"run.dir={tmp_path}", *arguments, cwd=tmp_path)
    assert_plain(ended, expected)
    assert ended.seconds < 60


def test_under_torchrun_the_message_is_there_once_above_its_own_report(tmp_path: Path) -> None:
    ended = run("torchrun", "--engine", "fsdp2", f"run.dir={tmp_path}", "data.manifest=/nowhere.jsonl", cwd=tmp_path)
    assert ended.status != 0
    assert ended.error.count("error: manifest") == 1, ended.error
