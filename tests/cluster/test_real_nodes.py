"""`deepspeed`, `mpirun` and `torchrun` over real nodes: the losses of a single process, the right exit statuses."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cluster.lab import missing
from tests.cluster.lab.nodes import Ended, Nodes
from tests.cluster.launched import TRAIN, ZERO2, Reference, assert_good
from tests.end_to_end.commands import BIN, ROOT, losses

DEEPSPEED = [BIN / "deepspeed", "--hostfile", "hostfiles/2node"]
MPIRUN = ["mpirun", "--allow-run-as-root", "--host", "node1:1,node2:1"]


def torchrun(nodes: Nodes, *arguments: str, names: tuple[str, ...] = ("node1", "node2")) -> list[Ended]:
    """A torchrun on each node; they meet on the first."""
    meeting = ["--nproc_per_node", "1", "--master_addr", nodes.address(names[0]), "--master_port", "29510"]
    command = [BIN / "torchrun", "--nnodes", str(len(names)), *meeting, "--node_rank"]
    agents = [nodes.start(name, *command, str(i), TRAIN, *arguments, cwd=ROOT) for i, name in enumerate(names)]
    return [nodes.end(agent) for agent in agents]


def test_deepspeed_over_two_nodes(nodes: Nodes, reference: Reference) -> None:
    command = [*DEEPSPEED, "--num_gpus", "1", TRAIN, *ZERO2, *reference.arguments("pdsh")]
    ended = nodes.run("node1", *command, cwd=ROOT)
    assert_good(nodes, ended)
    assert f"2 ranks, started by deepspeed, meet at {nodes.address('node1')}:29500" in ended.text
    reference.check("pdsh")


def test_deepspeed_passes_mistakes_words_and_statuses_on(nodes: Nodes, reference: Reference) -> None:
    odd = """data.manifest=/a b/$HOME;"c"'d'`e`/100%h.jsonl"""
    both = [*DEEPSPEED, "--include", "node2:0@node1:0", TRAIN]
    ended = nodes.run("node1", *both, reference.recipe, "run.nonsense=1", odd, cwd=ROOT)
    assert ended.status == 2, ended.text
    assert ended.text.count("run.nonsense is not a setting") == 1
    ended = nodes.run("node1", *both, *ZERO2, *reference.arguments("gone"), "model.path=/nowhere", cwd=ROOT)
    assert ended.status == 2, ended.text
    assert "Traceback" not in ended.text
    first = ["--exclude", "node1:1,2,3,4,5,6,7@node2:1,2,3,4,5,6,7"]
    ended = nodes.run("node1", *DEEPSPEED, *first, TRAIN, *ZERO2, "--print-settings", odd, cwd=ROOT)
    assert ended.status == 0, ended.text
    told = next(line for line in ended.text.splitlines() if " manifest: " in line)
    assert """/a b/$HOME;"c"'d'`e`/100%h.jsonl""" in told.replace("''", "'").replace('\\"', '"')
    assert not nodes.left()


def test_nodes_that_cannot_be_reached_are_named_before_anything_starts(nodes: Nodes, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
    nodes.cut("node2")
    try:
        ended = nodes.run("node1", BIN / "deepspeed", "--hostfile", tmp_path / "hosts", TRAIN, cwd=ROOT)
    finally:
        nodes.heal("node2")
    assert ended.status == 2, ended.text
    assert "1 of the 2 nodes" in ended.text
    assert "  node2: ssh: connect to host node2" in ended.text
    assert "Traceback" not in ended.text
    checked = nodes.run("node1", BIN / "qwen-edit-zero", "hostfile", "check", tmp_path / "hosts", "--ssh", cwd=ROOT)
    assert (checked.status, checked.text.splitlines()[-1][:11]) == (0, "all of them"), checked.text


@pytest.mark.usefixtures("own_names_are_loopback")
def test_torchrun_over_two_nodes_whose_own_names_are_loopback(nodes: Nodes, reference: Reference) -> None:
    for ended in torchrun(nodes, "--engine", "fsdp2", *reference.arguments("torchrun")):
        assert_good(nodes, ended)
    reference.check("torchrun")


@pytest.mark.usefixtures("own_names_are_loopback")
def test_mpirun_over_two_nodes(nodes: Nodes, reference: Reference) -> None:
    if lacking := missing.packages(missing.OPENMPI):
        pytest.skip(lacking)
    ended = nodes.run("node1", *MPIRUN, BIN / "python", TRAIN, "--engine", "ddp", *reference.arguments("mpi"), cwd=ROOT)
    assert_good(nodes, ended)
    assert "2 ranks, started by openmpi, meet at " in ended.text
    assert "step 3/3" in ended.text
    reference.check("mpi")


@pytest.mark.slow
def test_deepspeed_starts_ranks_with_open_mpi(nodes: Nodes, reference: Reference, tmp_path: Path) -> None:
    if lacking := missing.packages(missing.OPENMPI):
        pytest.skip(lacking)
    hosts = tmp_path / "hosts"
    hosts.write_text("node1 slots=1\nnode2 slots=1\n")
    how = ["--hostfile", hosts, "--launcher", "openmpi", "--launcher_args=--allow-run-as-root"]
    command = [BIN / "deepspeed", *how, TRAIN, *ZERO2, *reference.arguments("openmpi")]
    ended = nodes.run("node1", *command, cwd=ROOT)
    assert_good(nodes, ended)
    reference.check("openmpi")


@pytest.mark.slow
def test_deepspeed_over_eight_nodes(nodes: Nodes, tmp_path: Path) -> None:
    """The command of the README with the demo recipe, with one process a node, cut down to three steps."""
    short = ["run.max_steps=3", "data.max_samples=24", "sampling.count=0", "batch.micro_size=1", f"run.dir={tmp_path}"]
    short += ["schedule.warmup_steps=0", f"data.cache_dir={tmp_path / 'cache'}"]
    single = subprocess.run(
        [BIN / "python", TRAIN, "--engine", "ddp", *short, "run.name=single"], cwd=ROOT, check=False
    )
    assert single.returncode == 0
    command = [BIN / "deepspeed", "--hostfile", "hostfiles/8node", "--num_gpus", "1", TRAIN, *ZERO2]
    ended = nodes.run("node1", *command, *short, cwd=ROOT, timeout=560)
    assert_good(nodes, ended)
    assert "8 ranks, started by deepspeed, meet at " in ended.text
    assert losses(tmp_path / "demo") == pytest.approx(losses(tmp_path / "single"), rel=1e-5)
    assert len(losses(tmp_path / "demo")) == 3


@pytest.mark.slow
def test_launch_runs_torchrun_on_every_node_of_a_hostfile(nodes: Nodes, reference: Reference) -> None:
    where = ["--nodes", "2", "--gpus-per-node", "1", "--hostfile", "hostfiles/8node", "--launcher", "torchrun"]
    command = [BIN / "qwen-edit-zero", "launch", *reference.arguments("launch")[:1], *where, "--"]
    ended = nodes.run("node1", *command, "--engine", "ddp", *reference.arguments("launch")[1:], cwd=ROOT)
    assert_good(nodes, ended)
    reference.check("launch")


@pytest.mark.slow
def test_torchrun_restarts_a_job_whose_rank_on_another_node_was_killed(nodes: Nodes, reference: Reference) -> None:
    """torchrun counts the restart on the node of that rank alone; the ranks meet all the same."""
    names = ("node1", "node2")
    meeting = ["--rdzv_backend", "c10d", "--rdzv_endpoint", f"{nodes.address('node1')}:29511", "--rdzv_id", "again"]
    command = [BIN / "torchrun", "--nnodes", "2", "--nproc_per_node", "1", "--max_restarts", "1", *meeting]
    job = [TRAIN, "--engine", "ddp", *reference.arguments("restarted")]
    agents = [nodes.start(name, *command, *job, cwd=ROOT) for name in names]
    begun = []
    for line in agents[0].stdout or ():
        begun.append(line)
        if "training steps 1 to 3" in line:
            break
    (rank,) = [pid for pid, line in nodes.processes("node2").items() if TRAIN in line and "torchrun" not in line]
    os.kill(rank, signal.SIGKILL)
    for ended in (nodes.end(agent) for agent in agents):
        assert ended.status == 0, "".join(begun) + ended.text
    assert not nodes.left()
    reference.check("restarted")
