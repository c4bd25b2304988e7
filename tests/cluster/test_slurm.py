"""Slurm's compact lists and our batch scripts."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from qwen_edit_zero.cluster.slurm import expand_nodelist, expand_tasks_per_node
from qwen_edit_zero.errors import ClusterError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("alpha,beta,gamma", "alpha beta gamma"),
        ("n[001-004,7]", "n001 n002 n003 n004 n7"),
        ("n[8-11]", "n8 n9 n10 n11"),
        ("a-b-[3-4]", "a-b-3 a-b-4"),
        ("nodeA,nodeB[001,003],nodeC", "nodeA nodeB001 nodeB003 nodeC"),
        ("x[1-2],y[1-2]", "x1 x2 y1 y2"),
        ("rack[1-2]n[01-02]", "rack1n01 rack1n02 rack2n01 rack2n02"),
        ("gpu[1-2]-ib", "gpu1-ib gpu2-ib"),
        ("n[5-5]", "n5"),
        ("n[099-101]", "n099 n100 n101"),
        ("n2,n1", "n2 n1"),
    ],
)
def test_node_lists_are_expanded_in_their_order(text: str, hosts: str) -> None:
    assert expand_nodelist(text) == hosts.split()


@pytest.mark.parametrize(
    "text", ["", "n1,,n2", "n[]", "n[1-2]]", "n[1-2", "n[2-1]", "n[a-b]", "n[[1]]", "[0-999999999]"]
)
def test_node_lists_that_are_not_well_formed_are_refused(text: str) -> None:
    with pytest.raises(ClusterError):
        expand_nodelist(text)


def test_a_list_that_multiplies_without_end_is_refused_before_it_is_made() -> None:
    with pytest.raises(ClusterError, match="more than 100000 hosts"):
        expand_nodelist("n[1-9999][1-9999][1-9999][1-9999]")


def test_task_counts() -> None:
    assert expand_tasks_per_node("2(x3),1", 4) == [2, 2, 2, 1]
    assert expand_tasks_per_node("1,2,1") == [1, 2, 1]
    for text in ("", "4(x2", "a", "2(x99999999999)"):
        with pytest.raises(ClusterError):
            expand_tasks_per_node(text)
    with pytest.raises(ClusterError, match="there are 3"):
        expand_tasks_per_node("2(x2)", 3)


@pytest.mark.parametrize("script", sorted((ROOT / "slurm").glob("*.sbatch")), ids=lambda path: path.name)
def test_batch_scripts_are_valid_and_say_what_they_miss(script: Path, tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True)
    done = subprocess.run(
        ["bash", script], env={"PATH": os.environ["PATH"]}, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "start this script with sbatch" in done.stderr
    env = {"PATH": os.environ["PATH"], "SLURM_SUBMIT_DIR": str(tmp_path)}
    done = subprocess.run(["bash", script, "a", "b"], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")


def test_the_training_script_passes_arguments_status_and_signals_on(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text(
        '#!/bin/bash\ntrap "exit 143" TERM\nprintf "%s\\n" "$@" >"$ARGS"; sleep 2 & wait $!; exit 7\n'
    )
    (tools / "scontrol").write_text('#!/bin/bash\necho scontrol "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    env = {
        "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "5",
        "PYTHON": shutil.which("true") or "/bin/true", "ARGS": str(tmp_path / "args"),
    }  # fmt: skip

    def run(signal: str) -> tuple[int, str]:
        command = f'bash slurm/train.sbatch "a b" c & p=$!; sleep 0.7; [ {signal} = - ] || kill -{signal} $p; wait $p'
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    assert run("-")[0] == 7
    assert (tmp_path / "args").read_text().splitlines()[-2:] == ["a b", "c"]
    status, output = run("USR1")
    assert status == 7
    assert "scontrol requeue 5" in output
    assert run("TERM")[0] == 143
