"""`qwen-edit-zero launch` and `hostfile`: what they print, and what they refuse before anything starts."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from qwen_edit_zero.cluster.batch_script import BatchJob, train_script
from qwen_edit_zero.cluster.forwarding import inherited
from qwen_edit_zero.commands.launch import hostfile, launch
from qwen_edit_zero.errors import ClusterError, SettingsError, UserError
from tests.end_to_end.commands import BIN, ROOT

DEMO = "recipes/demo.yaml"


@pytest.fixture(autouse=True)
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for name in inherited(os.environ):  # other tests of this process may have set some for good
        monkeypatch.delenv(name)


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert launch([*words, "--dry-run"] if "--" not in words else _before_dashes(words)) == 0
    return capsys.readouterr().out


def _before_dashes(words: tuple[str, ...]) -> list[str]:
    cut = words.index("--")
    return [*words[:cut], "--dry-run", *words[cut:]]


def test_each_launcher_gets_its_command(capsys: pytest.CaptureFixture[str]) -> None:
    two = ("--nodes", "2", "--gpus-per-node", "1")
    files = ("--hostfile", "hostfiles/8node")
    train = f"qwen_edit_zero/train.py {DEMO} run.name='a b'"
    with_name = ("--", "run.name=ab")
    said = shown(capsys, DEMO, *two, "--launcher", "deepspeed", *files, *with_name)
    assert said == f"deepspeed --hostfile hostfiles/8node --num_nodes 2 --num_gpus 1 {train}\n".replace("'a b'", "ab")
    said = shown(capsys, DEMO, "--gpus-per-node", "2", "--launcher", "deepspeed")
    assert said == f"deepspeed --num_gpus 2 qwen_edit_zero/train.py {DEMO}\n"
    said = shown(capsys, DEMO, "--gpus-per-node", "2", "--launcher", "torchrun")
    assert said == f"torchrun --standalone --nproc_per_node 2 qwen_edit_zero/train.py {DEMO}\n"
    words = shlex.split(shown(capsys, DEMO, *two, "--launcher", "torchrun", *files))
    assert words[:6] == ["pdsh", "-S", "-R", "ssh", "-w", "node[1-2]"]
    torchrun = Path(sys.executable).with_name("torchrun")
    meeting = "--nproc_per_node 1 --master_addr node1 --master_port 29500"
    assert words[6] == f"cd {ROOT} && {torchrun} --nnodes 2 --node_rank %n {meeting} qwen_edit_zero/train.py {DEMO}"
    said = shown(capsys, DEMO, *two, "--launcher", "srun", "--option=--partition=gpu")
    assert said.startswith("srun --nodes=2 --ntasks-per-node=1 --gpus-per-node=1 --kill-on-bad-exit=1 --label ")
    assert f"--partition=gpu {sys.executable} -u qwen_edit_zero/train.py {DEMO}" in said
    said = shown(capsys, DEMO, *two, "--launcher", "sbatch", "--option=--partition=gpu", *with_name)
    assert said == train_script(BatchJob(2, 1, options=("--partition=gpu",)), [DEMO, "run.name=ab"])


def test_variables_of_this_machine_reach_the_nodes_that_torchrun_is_started_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "^lo $x")
    said = shown(capsys, DEMO, "--nodes", "2", "--gpus-per-node", "1", "--hostfile", "hostfiles/2node")
    assert "export NCCL_SOCKET_IFNAME='^lo $x'; cd" in shlex.split(said)[6]


@pytest.mark.parametrize(
    ("words", "error", "told"),
    [
        ([DEMO, "--nodes", "2"], ClusterError, "give --hostfile"),
        ([DEMO, "--nodes", "9", "--gpus-per-node", "1", "--hostfile", "hostfiles/8node"], ClusterError, "names 8"),
        ([DEMO, "--gpus-per-node", "4", "--hostfile", "hostfiles/localhost"], ClusterError, "gives localhost 2 slots"),
        ([DEMO, "--hostfile", "hostfiles/8node", "--launcher", "srun"], ClusterError, "takes its nodes from Slurm"),
        ([DEMO, "--hostfile", "nowhere", "--gpus-per-node", "1"], ClusterError, "nowhere cannot be read"),
        ([DEMO, "--gpus-per-node", "1", "--", "run.nonsense=1"], SettingsError, "run.nonsense is not a setting"),
        ([DEMO, "--gpus-per-node", "7"], SettingsError, "global_size"),
        (["recipes/nowhere.yaml"], SettingsError, "nowhere.yaml"),
        ([DEMO, "--nodes", "0"], SettingsError, "--nodes"),
        ([DEMO, "--launcher", "ssh"], SettingsError, "--launcher"),
    ],
)
def test_what_cannot_be_started_is_refused(words: list[str], error: type[UserError], told: str) -> None:
    with pytest.raises(error) as caught:
        launch([*words, "--dry-run"] if "--" not in words else _before_dashes(tuple(words)))
    assert told in str(caught.value)


def test_without_dry_run_the_command_runs_and_its_status_is_the_command_s(tmp_path: Path) -> None:
    torchrun = tmp_path / "torchrun"
    torchrun.write_text('#!/bin/bash\necho "$@"; exit 7\n')
    torchrun.chmod(0o755)
    command = [BIN / "qwen-edit-zero", "launch", DEMO, "--gpus-per-node", "2"]
    done = subprocess.run(
        command, cwd=ROOT, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    expected = f"--standalone --nproc_per_node 2 qwen_edit_zero/train.py {DEMO}\n"
    assert (done.returncode, done.stdout) == (7, expected), done.stderr
    done = subprocess.run(command, cwd=ROOT, env={"PATH": "/bin"}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr[:32]) == (2, "error: torchrun is not installed")


def test_a_hostfile_is_checked_and_converted(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert hostfile(["check", "hostfiles/8node"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "8 nodes, 64 ranks; rank 0 is on node1"
    assert hostfile(["convert", "hostfiles/2node", "--to", "mpich"]) == 0
    assert capsys.readouterr().out == "node1:8\nnode2:8\n"
    (tmp_path / "list").write_text("n[2,1]\n")
    assert hostfile(["convert", str(tmp_path / "list"), "--from", "slurm", "--slots", "4", "--to", "deepspeed"]) == 0
    assert capsys.readouterr().out == "n2 slots=4\nn1 slots=4\n"
    (tmp_path / "hosts").write_text("alice@n2 slots=4\nn1 slots=4\n")
    assert hostfile(["convert", str(tmp_path / "hosts"), "--to", "slurm"]) == 0
    said = capsys.readouterr()
    assert said.out == "--nodes=2 --nodelist=n[2,1] --ntasks-per-node=4 --gpus-per-node=4\n"
    assert "the users of n2 are left out" in said.err
    assert "Slurm puts nodes into an order of its own" in said.err


def test_mistakes_have_status_2_and_one_message(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node1 slots=8\nnode2 slots=8.5\n")
    for words in (["hostfile", "check", tmp_path / "hosts"], ["launch", DEMO, "--nodes", "2", "--gpus-per-node", "1"]):
        done = subprocess.run([BIN / "qwen-edit-zero", *words], cwd=ROOT, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1), done.stderr
        assert done.stderr.startswith("error: ")
