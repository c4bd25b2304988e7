"""The training command: its arguments, and how launchers start it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.command_line import parse_train_arguments

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "qwen_edit_zero/train.py"


def test_without_arguments_the_demo_goes_on_from_its_newest_checkpoint() -> None:
    found = asdict(parse_train_arguments([]))
    assert found.pop("resume") == "auto"
    assert not any(found.values()), found


def test_arguments_may_come_in_any_order() -> None:
    words = [
        "--local_rank=1",
        "run.seed=1",
        "--ds",
        "a.json",
        "r.yaml",
        "--resume",
        "x/step-00000002",
        "model.lora=null",
    ]
    parsed = parse_train_arguments(words)
    assert (parsed.recipe, parsed.ds, parsed.resume) == (Path("r.yaml"), Path("a.json"), "x/step-00000002")
    assert (parsed.overrides, parsed.local_rank) == (("run.seed=1", "model.lora=null"), 1)
    assert parse_train_arguments(["--local-rank", "0"]).local_rank == 0
    assert parse_train_arguments(["--fast-dev-run"]).resume == "none"
    assert parse_train_arguments(["--fast-dev-run", "--resume", "auto"]).resume == "auto"
    assert parse_train_arguments(["runs/a=b/r.yaml"]).recipe == Path("runs/a=b/r.yaml")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--resume", ""], "--resume is given an empty value"),
        (["--print-setings"], "unknown option --print-setings; did you mean --print-settings?"),
        (["--batch.global_size=8"], "settings are given without dashes: batch.global_size=value"),
        (["--deepspeed_config", "a.json"], "unknown option --deepspeed_config"),
        (["a.yaml", "b.yaml"], "a.yaml and b.yaml are given"),
        (["--engine", "dp"], "invalid choice: 'dp'"),
        (["--ds"], "expected one argument"),
        (["--pri"], "unknown option --pri"),
    ],
)
def test_wrong_arguments_are_named(words: list[str], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        parse_train_arguments(words)
    assert message in str(caught.value)


def run(*words: str, cwd: Path = ROOT, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(
        [sys.executable, SCRIPT, *words], cwd=cwd, env=env | environment, capture_output=True, text=True, check=False
    )


def ranked(rank: int, world: int) -> dict[str, str]:
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
    }  # fmt: skip


def test_settings_and_help_are_printed_by_rank_0_alone(tmp_path: Path) -> None:
    for option in ("--print-settings", "--help"):
        assert run(option, cwd=tmp_path, **ranked(0, 2)).stdout
        assert run(option, cwd=tmp_path, **ranked(1, 2)).stdout == ""


def test_a_number_of_ranks_that_does_not_fit_is_told_before_anything_is_loaded(tmp_path: Path) -> None:
    began = time.monotonic()
    done = run("batch.global_size=8", "batch.micro_size=1", cwd=tmp_path, **ranked(0, 3))
    assert done.returncode == 2
    assert done.stderr.startswith("error: batch.global_size 8 (override) does not divide over 3 ranks")
    assert "global sizes that fit: 3, 6, 9, 12" in done.stderr
    assert time.monotonic() - began < 10, "torch was loaded, or the machine is very busy"
    assert list(tmp_path.iterdir()) == []


def test_printing_settings_makes_no_guess_about_the_number_of_ranks() -> None:
    done = run("--print-settings", "batch.global_size=24", "--ds", "ds_configs/zero2.json")
    assert done.returncode == 0
    assert "global_size: 24" in done.stdout


def test_the_launchers_local_rank_must_agree() -> None:
    done = run("--local_rank=1", "--print-settings", **ranked(0, 2))
    assert done.returncode == 2
    assert "--local_rank says 1" in done.stderr


def test_the_script_puts_its_project_in_front_and_takes_its_own_folder_away() -> None:
    code = (
        f"import runpy, sys, json; sys.path[0] = {str(SCRIPT.parent)!r}; sys.argv = [{str(SCRIPT)!r}, '--help']\n"
        f"try: runpy.run_path({str(SCRIPT)!r}, run_name='__main__')\n"
        "except SystemExit: pass\n"
        "print(); print(json.dumps(sys.path))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    path = json.loads(done.stdout.splitlines()[-1])
    assert path[0] == str(ROOT)
    assert str(SCRIPT.parent) not in path
