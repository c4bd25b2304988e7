"""The doctor on real nodes: odd code, a folder that is not shared, a slow link and a missing rank are named."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cluster.lab.nodes import Ended, Nodes
from tests.cluster.launched import TRAIN, ZERO2
from tests.end_to_end.commands import BIN, ROOT

THREE = ("node1", "node2", "node3")
BATCH = "batch.global_size=3"
CODE = "qwen_edit_zero/training/lr.py"


def torchrun(nodes: Nodes, *arguments: str | Path, names: tuple[str, ...] = THREE, world: int = 3) -> list[Ended]:
    """A torchrun on each of `names`, of a job of `world` nodes."""
    meeting = ["--nproc_per_node", "1", "--master_addr", nodes.address("node1"), "--master_port", "29530"]
    command = [BIN / "torchrun", "--nnodes", str(world), *meeting, "--node_rank"]
    agents = [
        nodes.start(name, *command, str(THREE.index(name)), TRAIN, *map(str, arguments), cwd=ROOT) for name in names
    ]
    return [nodes.end(agent, timeout=120) for agent in agents]


@contextmanager
def mounted(nodes: Nodes, name: str, *mount: str | Path, at: Path) -> Iterator[None]:
    """Something else at a path of one node."""
    done = nodes.run(name, "mount", *mount, at, cwd=ROOT)
    assert done.status == 0, done.text
    try:
        yield
    finally:
        nodes.run(name, "umount", at, cwd=ROOT)


@contextmanager
def slowed(nodes: Nodes, name: str, other: str) -> Iterator[None]:
    """These two reach each other over a cable of their own, of 2 Mbit/s."""
    pids = {node: str(nodes.first_process(node)) for node in (name, other)}
    cable = ["ip", "link", "add", "slow0", "type", "veth", "peer", "name", "slow0", "netns", pids[other]]
    subprocess.run(["nsenter", "--target", pids[name], "--net", *cable], check=True)
    try:
        for here, there in ((name, other), (other, name)):
            for command in (
                "ip link set slow0 up",
                "tc qdisc add dev slow0 root tbf rate 2mbit burst 16kb latency 400ms",
                f"ip route add {nodes.address(there)}/32 dev slow0 src {nodes.address(here)}",
            ):
                done = nodes.run(here, *command.split(), cwd=ROOT)
                assert done.status == 0, done.text
        yield
    finally:
        nodes.run(name, "ip", "link", "del", "slow0", cwd=ROOT)


def test_the_odd_node_the_folder_apart_and_the_slow_link_are_named(nodes: Nodes, recipe: str, tmp_path: Path) -> None:
    """One start with three faults: node2 has other code, node3 a folder of its own, and their link is slow."""
    changed, runs, told = tmp_path / "lr.py", tmp_path / "runs", tmp_path / "told.json"
    changed.write_text((ROOT / CODE).read_text() + "# changed\n")
    runs.mkdir()
    with (
        mounted(nodes, "node2", "--bind", changed, at=ROOT / CODE),
        mounted(nodes, "node3", "-t", "tmpfs", "own", at=runs),
        slowed(nodes, "node2", "node3"),
    ):
        first, *_ = torchrun(
            nodes, recipe, "--engine", "ddp", "--doctor", "--json", told, "--timeout", "20", f"run.dir={runs}", BATCH
        )
    print(first.text)
    found = json.loads(told.read_text())
    assert found["exit_status"] == 2
    wrong = {(f["name"], f["level"]): f["text"] for f in found["findings"] if f["level"] in ("warning", "failure")}
    assert wrong["code", "failure"].startswith(f"{CODE} is another (")
    assert ") on node2, as it should be on the 2 others" in wrong["code", "failure"]
    assert (
        f"run.dir {runs}/small is not there, on node3: tmpfs (own on {runs}); on node1: " in wrong["shared", "failure"]
    )
    assert wrong["slow link", "warning"].startswith("between node2 and node3: ")
    assert "mend the failures before training: " in first.text
    assert not nodes.left()


@pytest.mark.slow
def test_deepspeed_starts_the_doctor_and_a_slow_node_is_only_a_warning(
    nodes: Nodes, recipe: str, tmp_path: Path
) -> None:
    hosts, told = tmp_path / "hosts", tmp_path / "told.json"
    hosts.write_text("".join(f"{name} slots=1\n" for name in THREE))
    limit = "tc qdisc add dev eth0 root tbf rate 4mbit burst 64kb latency 400ms"
    assert nodes.run("node3", *limit.split(), cwd=ROOT).status == 0
    try:
        command = [BIN / "deepspeed", "--hostfile", hosts, TRAIN, recipe, *ZERO2, "--doctor", "--json", told]
        ended = nodes.run("node1", *command, f"run.dir={tmp_path}", BATCH, cwd=ROOT, timeout=120)
    finally:
        nodes.run("node3", "tc", "qdisc", "del", "dev", "eth0", "root", cwd=ROOT)
    assert ended.status == 0, ended.text
    found = json.loads(told.read_text())
    slow = [f["text"] for f in found["findings"] if f["name"] == "slow node"]
    assert len(slow) == 1, ended.text
    assert slow[0].startswith("node3 is slow with all 2 nodes that were tried: ")
    assert not [f for f in found["findings"] if f["level"] == "failure"], ended.text
    assert "3 ranks on 3 nodes (node[1-3]), started by deepspeed" in ended.text
    assert len(found["pairs"]) == 3
    assert not nodes.left()


@pytest.mark.slow
def test_training_is_refused_where_nodes_are_not_alike(nodes: Nodes, recipe: str, tmp_path: Path) -> None:
    changed, runs = tmp_path / "lr.py", tmp_path / "runs"
    changed.write_text((ROOT / CODE).read_text() + "# changed\n")
    runs.mkdir()
    with (
        mounted(nodes, "node2", "--bind", changed, at=ROOT / CODE),
        mounted(nodes, "node3", "-t", "tmpfs", "own", at=runs),
    ):
        first, *others = torchrun(nodes, recipe, "--engine", "ddp", f"run.dir={runs}", BATCH)
    assert "error: this must be mended before training (the same command with --doctor tells more):\n" in first.text
    assert f"  code: {CODE} is another (" in first.text
    assert f"  shared: run.dir {runs}/small is not there, on node3: " in first.text
    assert "step 1/" not in first.text
    assert all(ended.status for ended in (first, *others))
    assert list(runs.iterdir()) == []  # nothing of the question is left
    assert not nodes.left()
