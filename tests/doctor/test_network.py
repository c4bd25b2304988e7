"""Which interface is used, and how nodes differ in it."""

from __future__ import annotations

import pytest

from qwen_edit_zero.doctor import network
from qwen_edit_zero.doctor.findings import Level
from qwen_edit_zero.doctor.network import Interface, nccl_choice

FACES = {"lo": "127.0.0.1", "docker0": "172.17.0.1", "eth0": "10.0.0.1", "eth01": "10.2.0.1", "ib0": "10.1.0.1"}


@pytest.mark.parametrize(
    ("wish", "chosen"),
    [
        ("", "ib0"),
        ("eth", "eth0"),
        ("=eth01", "eth01"),
        ("^ib,docker,lo", "eth0"),
        ("^=ib0,lo,docker0", "eth0"),
        ("bond", None),
    ],
)
def test_nccl_chooses_by_its_variable(wish: str, chosen: str | None) -> None:
    assert nccl_choice({"NCCL_SOCKET_IFNAME": wish} if wish else {}, FACES) == chosen


def test_loopback_is_nccls_last_choice() -> None:
    assert nccl_choice({}, {"lo": "127.0.0.1", "eth0": "10.0.0.1"}) == "eth0"
    assert nccl_choice({}, {"lo": "127.0.0.1"}) == "lo"


def test_the_interface_of_this_machine_can_be_looked_at() -> None:
    assert network.look("gloo", {"GLOO_SOCKET_IFNAME": "lo"}).is_loopback
    assert network.look("nccl", {"NCCL_SOCKET_IFNAME": "lo"}).mtu >= 1500


def test_nodes_that_differ_are_named() -> None:
    face = Interface("ib0", "10.1.0.1", 4092, 400_000, False)
    odd = Interface("eth0", "10.0.0.3", 1500, 10_000, True)
    found = {f.name: f for f in network.judge({"node1": face, "node2": face, "node3": odd}, "nccl")}
    assert found["interface"].text == "eth0 on node3, ib0 on the 2 others"
    assert found["MTU"].text == "1500 on node3, 4092 on the 2 others"
    assert found["link speed"].text == "10000 on node3, 400000 on the 2 others"
    assert found["host names"].text.startswith("the own name of node3 ")
    assert {f.level for f in found.values()} == {Level.WARNING}
    assert {f.level for f in network.judge({"node1": face, "node2": face}, "nccl")} == {Level.OK}
