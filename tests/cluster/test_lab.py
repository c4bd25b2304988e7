"""The nodes that the other tests of real launches stand on: they are there, can be cut off, and never stay behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cluster.lab import missing
from tests.cluster.lab.nodes import Nodes, command_lines
from tests.end_to_end.commands import ROOT

PROGRAM = """
import sys, time
from pathlib import Path
from tests.cluster.lab.nodes import Nodes

with Nodes(Path(sys.argv[1]), ["a1", "a2"]) as nodes:
    running = nodes.start("a2", "sleep", "1000", cwd=Path("/"))
    print("up", flush=True)
    time.sleep(1000)
"""


def test_nodes_have_names_and_reach_each_other_until_the_cable_is_pulled(nodes: Nodes, tmp_path: Path) -> None:
    told = nodes.run("node1", "ssh", "node8", "hostname; hostname -I", cwd=tmp_path)
    assert told.text.split() == ["node8", nodes.address("node8")]
    everyone = nodes.run("node3", "pdsh", "-R", "ssh", "-w", "node[1-8]", "echo %n", cwd=tmp_path)
    assert sorted(everyone.text.splitlines()) == [f"node{i + 1}: {i}" for i in range(8)]
    nodes.cut("node8")
    cut = nodes.run("node1", "ssh", "-o", "ConnectTimeout=2", "node8", "true", cwd=tmp_path)
    nodes.heal("node8")
    assert cut.status == 255
    assert nodes.run("node1", "ssh", "node8", "true", cwd=tmp_path).status == 0


def test_nothing_stays_when_whoever_made_the_nodes_is_killed(tmp_path: Path) -> None:
    if lacking := missing.nodes():
        pytest.skip(lacking)
    folder = tmp_path / "lab"
    maker = subprocess.Popen([sys.executable, "-c", PROGRAM, folder], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert maker.stdout is not None
    assert maker.stdout.readline() == "up\n"
    inside = {pid: line for pid, line in command_lines().items() if str(folder) in line and "node.sh" in line}
    assert len(inside) >= 2
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    deadline = time.monotonic() + 30
    while left := [line for line in command_lines().values() if f"{folder} " in line or line == "sleep 1000"]:
        assert time.monotonic() < deadline, left
        time.sleep(0.1)
    names = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    assert "a1" not in names
