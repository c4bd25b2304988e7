"""Limits, memory and GPUs of nodes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from qwen_edit_zero.doctor import gpus, machine, room
from qwen_edit_zero.doctor.findings import Finding, Level
from qwen_edit_zero.doctor.gpus import Gpu, Health
from qwen_edit_zero.doctor.machine import Machine
from qwen_edit_zero.doctor.needs import Needs
from qwen_edit_zero.doctor.nodes import Node
from qwen_edit_zero.settings.load import load_settings

NODES = [Node("node1", tuple(range(8))), Node("node2", tuple(range(8, 16)))]
GOOD = Machine(cores=96, threads=1, memory_free=10**12, shm_free=10**11, open_files=65536, locked=-1, infiniband=True)
NEEDS = Needs(20_400_000_000, 20_400_000_000, 245 * 10**9)


def of(name: str, found: list[Finding]) -> Finding:
    (finding,) = [finding for finding in found if finding.name == name]
    return finding


def judged(name: str, **changed: int) -> Finding:
    machines = {"node1": GOOD, "node2": replace(GOOD, **changed)}
    return of(name, machine.judge(machines, NODES, NEEDS, on_gpus=True, asynchronous=True))


def test_a_good_node_has_nothing_to_mend() -> None:
    found = machine.judge({"node1": GOOD, "node2": GOOD}, NODES, NEEDS, on_gpus=True, asynchronous=True)
    assert {finding.level for finding in found} == {Level.OK}


def test_what_is_short_is_named_with_its_node() -> None:
    short = judged("memory", memory_free=50 * 10**9)
    assert (short.level, short.text) == (
        Level.FAILURE,
        "50 GB of memory free; a checkpoint's copy takes 122 GB a node (on node2)",
    )
    assert judged("cores", threads=24).level is Level.WARNING
    assert judged("/dev/shm", shm_free=64 << 20).text.endswith("(on node2)")
    assert judged("locked memory", locked=8 << 20).level is Level.WARNING
    assert judged("open files", open_files=256).level is Level.WARNING


def test_rank_0_needs_files_for_the_connections_of_all() -> None:
    nodes = [Node("first", tuple(range(512)))]
    (found,) = [
        f
        for f in machine.judge({"first": replace(GOOD, open_files=1024)}, nodes, None, on_gpus=False, asynchronous=True)
        if f.name == "open files"
    ]
    assert found.level is Level.FAILURE
    assert found.advice == "ulimit -n 65536"


def test_nodes_with_fewer_ranks_are_named() -> None:
    nodes = [Node("node1", (0, 1)), Node("node2", (2, 3)), Node("node3", (4,))]
    found = machine.judge(
        dict.fromkeys(("node1", "node2", "node3"), GOOD), nodes, None, on_gpus=False, asynchronous=True
    )
    assert of("ranks a node", found).text == "1 on node3, 2 on the 2 others"


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    found = machine.look(shm=tmp_path)
    assert found.cores >= 1
    assert found.memory_free > 0
    assert found.shm_free > 0


SMI = """\
0, 570.86.15, 0, Not Active, Not Active, Not Active, Not Active
1, 570.86.15, 3, Active, Active, Not Active, Not Active
2, 570.86.15, [N/A], Not Active, Not Active, Not Active, Not Active
"""


def test_what_nvidia_smi_tells_of_unwell_gpus() -> None:
    assert gpus.parse_health(SMI) == Health(
        "570.86.15",
        3,
        (
            "GPU 1 has 3 uncorrected memory errors",
            "GPU 1 is slowed down (hw_slowdown, hw_thermal_slowdown)",
        ),
    )


def test_odd_busy_and_old_gpus_are_named() -> None:
    nodes = [Node("node1", (0,)), Node("node2", (1,)), Node("node3", (2,))]
    good = Gpu("node1", "NVIDIA H200", 150 << 30, 149 << 30, "9.0", True)
    old = Gpu("node3", "Tesla V100", 32 << 30, 12 << 30, "7.0", False)
    healths = {"node1": Health("570"), "node2": Health("570"), "node3": Health("535", 1, ("GPU 0 has 1 ...",))}
    found = gpus.judge([good, replace(good, host="node2"), old], healths, nodes, precision="bf16")
    assert of("GPUs", found).text == "Tesla V100 on node3, NVIDIA H200 on the 2 others"
    assert of("driver", found).text == "535 on node3, 570 on the 2 others"
    assert "of the GPU of rank 2 (node3) are used" in of("GPU memory", found).text
    assert of("bf16", found).level is Level.FAILURE
    assert of("GPU health", found).text == "node3: GPU 0 has 1 ..."


def test_on_cpus_there_is_nothing_to_look_at() -> None:
    assert gpus.look(torch.device("cpu")) is None
    (finding,) = gpus.judge([None], {}, [Node("a", (0,))], precision="bf16")
    assert finding.level is Level.UNCHECKED


def test_a_run_that_does_not_fit_its_gpus_is_told_before_it_starts() -> None:
    settings = load_settings(Path("recipes/full_finetune.yaml"), overrides=["model.path=Qwen-Image-Edit-2509"]).settings
    small = Gpu("node1", "NVIDIA A100-SXM4-40GB", 42_300_000_000, 42_000_000_000, "8.0", True)
    nodes = [Node(f"node{i}", tuple(range(8 * i, 8 * i + 8))) for i in range(8)]
    (told,) = room.judge(settings, None, [small] * 8, nodes[:1])
    assert told.level is Level.WARNING
    assert "39.4 GiB" in told.text
    assert "plan --recommend" in told.advice
    (told,) = room.judge(settings, None, [small] * 64, nodes)
    assert told.level is Level.OK
    assert not room.judge(settings, None, [None], nodes)
