"""Slurm's compact lists and our batch scripts."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from qwen_edit_zero.cluster.batch_script import BatchJob, train_script
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


def test_the_training_script_is_what_the_command_makes() -> None:
    assert (ROOT / "slurm/train.sbatch").read_text(encoding="utf-8") == train_script(BatchJob())


def test_a_script_for_other_nodes_has_its_numbers_options_and_arguments(tmp_path: Path) -> None:
    job = BatchJob(nodes=4, gpus_per_node=2, name="mine", options=("--partition=gpu", "--account=lab"))
    text = train_script(job, ["recipes/lora.yaml", "data.columns={target: a b}"])
    for line in ("--nodes=4", "--gpus-per-node=2", "--ntasks-per-node=2", "--job-name=mine", "--account=lab"):
        assert f"#SBATCH {line}\n" in text
    assert "set -- recipes/lora.yaml 'data.columns={target: a b}' \"$@\"\n" in text
    assert text.index("#SBATCH --account") < text.index("set -euo")  # Slurm reads no option behind the first command
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)


def test_the_training_script_passes_arguments_status_and_signals_on(tmp_path: Path) -> None:
    """With commands that stand in for Slurm's; test_real_slurm.py has the real ones."""
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text(
        '#!/bin/bash\ntrap "exit 75" USR1\ntrap "exit 143" TERM\n'
        'printf "%s\\n" "$@" "$MASTER_ADDR" >"$ARGS"; sleep 2 & wait $!; exit 7\n'
    )
    (tools / "scontrol").write_text('#!/bin/bash\n[[ $1 == show ]] && echo node7 || echo scontrol "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    env = {
        "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "5",
        "SLURM_JOB_NODELIST": "node[7-8]", "SLURM_JOB_NUM_NODES": "2", "SLURM_GPUS_ON_NODE": "4",
        "PYTHON": shutil.which("true") or "/bin/true", "ARGS": str(tmp_path / "args"),
    }  # fmt: skip

    def run(signal: str) -> tuple[int, str]:
        (tmp_path / "args").unlink(missing_ok=True)
        wait = 'bash slurm/train.sbatch "a b" c & p=$!; until [ -s "$ARGS" ]; do sleep 0.1; done'
        command = f"{wait}; [ {signal} = - ] || kill -{signal} $p; wait $p"
        done = subprocess.run(["bash", "-c", command], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    assert run("-")[0] == 7
    given = (tmp_path / "args").read_text().splitlines()
    assert given[-3:] == ["a b", "c", "node7"]
    assert "--ntasks=8" in given
    status, output = run("USR1")
    assert status == 75
    assert "scontrol requeue 5" in output
    status, output = run("TERM")
    assert status == 7  # Slurm itself tells the ranks
    assert "requeue" not in output
