"""Ranks that do not come, and clocks that are apart."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

from qwen_edit_zero.cluster.identity import Identity
from qwen_edit_zero.cluster.pulse import Seen
from qwen_edit_zero.doctor import clocks, meeting
from qwen_edit_zero.doctor.findings import Level
from qwen_edit_zero.doctor.meeting import RollCall, absence_text, rank_hosts
from qwen_edit_zero.doctor.standstill import standstill
from qwen_edit_zero.errors import ClusterError
from tests.ranks import free_port, run_ranks

CPU = torch.device("cpu")


def call(rank: int, port: int, world: int, seconds: float) -> None:
    store = TCPStore("127.0.0.1", port, None, rank == 0, timedelta(seconds=20), False, multi_tenant=True)
    RollCall(Identity(rank, rank, world, world, "torchrun", "127.0.0.1", port), CPU, seconds)(store)


def test_all_go_on_when_all_have_come() -> None:
    port = free_port()
    late = threading.Thread(target=call, args=(1, port, 2, 20.0))
    late.start()
    call(0, port, 2, 20.0)
    late.join()


def test_a_rank_that_does_not_come_is_named() -> None:
    with pytest.raises(ClusterError, match=r"2 of 3 ranks have not come within 1 s: ranks 1-2\. Those that have: 1 on"):
        call(0, free_port(), 3, 1.0)


def test_the_hosts_of_missing_ranks_are_named_where_slurm_tells() -> None:
    hosts = rank_hosts({"SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "2(x3)"})
    text = absence_text({0: "n1|", 1: "n1|", 2: "n2|", 5: "n3|"}, 6, 30.0, hosts)
    assert text.startswith("2 of 6 ranks have not come within 30 s: ranks 3-4, on n[2-3]. Those that have: 2 on n1, ")
    assert rank_hosts({})(3) == ""


def test_nodes_without_gpus_and_on_loopback_are_named() -> None:
    keys = ["node1|", "node2|", "node3|"]
    with pytest.raises(ClusterError, match="cpu on node3, cuda on the 2 others"):
        meeting._check_devices(keys, ["cuda", "cuda", "cpu"])
    with pytest.raises(ClusterError, match="node2 would use the interface lo, "):
        meeting._check_interfaces(keys, ["", "lo", ""])
    meeting._check_interfaces(["node1|"], ["lo"])


def read(rank: int, world: int) -> list[list[float]]:
    import time

    return clocks.readings(CPU, lambda: time.time() - (7.0 if rank == 2 else 0.0))


def test_a_clock_that_is_behind_is_named() -> None:
    ahead = clocks.offsets(run_ranks(read, 3)[1])
    found = clocks.judge({f"node{rank + 1}": seconds for rank, seconds in enumerate(ahead)})
    assert found.level is Level.WARNING
    assert found.text.endswith("s behind the others on node3")
    assert found.text.startswith(("7.0 ", "6.9 ", "7.1 "))
    assert clocks.judge({"node1": 0.0, "node2": 0.4}).level is Level.OK


def test_the_rank_that_the_others_wait_for_is_named() -> None:
    waiting = [Seen(rank, f"node{rank}", 40 + rank, 0, 5, "waiting for the others") for rank in range(8)]
    late = Seen(8, "node8", 48, 0, 4, "reading the model /models/x")
    text = standstill(90, "folders", [*waiting, late])
    assert text.startswith(
        "the doctor has not ended within 90 s, at: folders. The others wait for rank 8 (node8, process 48), reading "
        "the model /models/x; look at that node"
    )
    assert "do not get data through" in standstill(90, "devices and network", waiting)
    assert "do not get data through" in standstill(90, "devices and network", [])
