"""The console command: quick help, plain errors, exit statuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from qwen_edit_zero import settings as settings_package
from tests.end_to_end.commands import BIN, ROOT, TRAIN

PACKAGE = Path(settings_package.__file__).parents[1]


def call(*command: str | Path, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "verb", [[], ["train"], ["consolidate"], ["report"], ["hostfile", "check"], ["checkpoint"], ["plan"]]
)
def test_every_verb_has_help(verb: list[str]) -> None:
    done = call(BIN / "qwen-edit-zero", *verb, "--help")
    assert done.returncode == 0
    assert "usage: qwen-edit-zero" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--print-settings"], ["optimizer.lr=fast"], ["recipes/nowhere.yaml"], ["--ds", "nowhere.json"]],
)
def test_help_and_settings_never_wait_for_torch(arguments: list[str]) -> None:
    script = f"""
import runpy, sys
sys.argv = [{TRAIN!r}, *{arguments!r}]
try:
    runpy.run_path({TRAIN!r}, run_name="__main__")
finally:
    print("torch" in sys.modules, flush=True)
"""
    done = call(sys.executable, "-c", script)
    slow = {"torch", "deepspeed", "diffusers"}
    if done.returncode == 2:  # a mistake ends the process at once, without Python's own clean-up
        done = call(sys.executable, "-X", "importtime", TRAIN, *arguments)
        imported = {
            line.rsplit("|", 1)[-1].strip() for line in done.stderr.splitlines() if line.startswith("import time")
        }
        assert not imported & slow
        assert "error: " in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        assert done.stdout.rstrip().endswith("False")


def test_a_wrong_verb_is_told_in_a_line_with_status_2() -> None:
    done = call(BIN / "qwen-edit-zero", "consolidat", "a", "b")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr


def test_what_is_no_checkpoint_is_said_to_be_none(tmp_path: Path) -> None:
    for verb in (["consolidate", str(tmp_path), str(tmp_path / "out")], ["checkpoint", "verify", str(tmp_path)]):
        done = call(BIN / "qwen-edit-zero", *verb)
        assert done.returncode == 2
        assert f"{tmp_path} is not a checkpoint" in done.stderr
        assert "Traceback" not in done.stderr


def test_hostfile_check_says_where_each_rank_runs() -> None:
    done = call(BIN / "qwen-edit-zero", "hostfile", "check", "hostfiles/2node", "--exclude", "node1:0")
    assert done.returncode == 0
    assert done.stdout.splitlines() == [
        "node1: ranks 0-6 on slots 1,2,3,4,5,6,7",
        "node2: ranks 7-14 on slots 0,1,2,3,4,5,6,7",
        "2 nodes, 15 ranks; rank 0 is on node1",
    ]


def test_no_module_of_the_package_hides_one_that_others_import() -> None:
    dependencies = {"torch", "deepspeed", "diffusers", "transformers", "pydantic", "yaml", "PIL", "datasets", "numpy"}
    names = {path.stem for path in PACKAGE.glob("*.py")} | {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert not names & (set(sys.stdlib_module_names) | dependencies)
