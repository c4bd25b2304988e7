"""Which node is the odd one."""

from __future__ import annotations

from qwen_edit_zero.doctor.nodes import group_nodes, node_key, odd_nodes, told_apart


def test_ranks_are_grouped_by_node_wherever_they_are() -> None:
    nodes = group_nodes(["a|1|1", "b|1|2", "a|1|1", "b|1|2"])
    assert [(node.name, node.ranks, node.leader) for node in nodes] == [("a", (0, 2), 0), ("b", (1, 3), 1)]


def test_two_nodes_of_one_name_are_told_apart() -> None:
    nodes = group_nodes(["gpu|boot-1|1", "gpu|boot-2|1"])
    assert [node.name for node in nodes] == ["gpu#1", "gpu#2"]


def test_processes_of_this_node_have_one_key() -> None:
    assert node_key() == node_key()


def test_the_odd_nodes_come_first_and_the_others_are_counted() -> None:
    values = {f"node{n}": "2.13.0" for n in range(1, 9)} | {"node3": "2.12.1", "node4": "2.12.1"}
    assert odd_nodes(values) == ["node3", "node4"]
    assert told_apart(values) == "2.12.1 on node[3-4], 2.13.0 on the 6 others"


def test_of_two_nodes_both_are_named() -> None:
    assert told_apart({"node1": "a", "node2": "b"}) == "b on node2, a on node1"
