"""Hostfiles and DeepSpeed's filters."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen_edit_zero.cluster.hostfile import Host, filter_hosts, parse_hostfile
from qwen_edit_zero.errors import ClusterError

ROOT = Path(__file__).parents[2]
BOTH = [("node1", 8), ("node2", 8)]


def parse(tmp_path: Path, content: str | bytes) -> list[Host]:
    path = tmp_path / "hosts"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return parse_hostfile(path)


@pytest.mark.parametrize(("name", "nodes", "ranks"), [("localhost", 1, 2), ("2node", 2, 16), ("8node", 8, 64)])
def test_shipped_hostfiles(name: str, nodes: int, ranks: int) -> None:
    hosts = parse_hostfile(ROOT / "hostfiles" / name)
    assert (len(hosts), sum(host.slots for host in hosts)) == (nodes, ranks)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("node1 slots=8\nnode2 slots=8\n", BOTH),
        ("# cluster A\nnode1 slots=8\n  # indented\nnode2 slots=8\n", BOTH),
        ("node1 slots=8 # rack 3\nnode2 slots=8#x\n", BOTH),
        ("\nnode1 slots=8\n\n   \nnode2 slots=8\n\n", BOTH),
        ("node1 slots=8\r\nnode2 slots=8\r\n", BOTH),
        ("\ufeffnode1 slots=8\nnode2 slots=8\n", BOTH),
        ("node1 slots=8\nnode2 slots=8", BOTH),
        ("   node1\tslots=8\n", [("node1", 8)]),
        ("node1 slots=4 max_slots=8\nnode2 max-slots=8 slots=4\n", [("node1", 4), ("node2", 4)]),
        ("10.0.0.1 slots=8\n10.0.0.2 slots=8\n", [("10.0.0.1", 8), ("10.0.0.2", 8)]),
        ("fd00::1 slots=2\n", [("fd00::1", 2)]),
        ("gpu-node-01.example.test slots=8\n", [("gpu-node-01.example.test", 8)]),
        ("node2 slots=2\nnode1 slots=2\n", [("node2", 2), ("node1", 2)]),
    ],
)
def test_hosts_are_read_in_the_order_of_the_file(tmp_path: Path, content: str, expected: list[tuple[str, int]]) -> None:
    assert [(host.name, host.slots) for host in parse(tmp_path, content)] == expected


def test_a_user_is_for_ssh_only(tmp_path: Path) -> None:
    assert parse(tmp_path, "\nalice@10.0.0.1 slots=2\n") == [Host("10.0.0.1", 2, 2, "alice")]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("node1 slots=8\nnode2 lots=8\n", "hosts:2: 'node2 lots=8': lots=8 is not slots=N; did you mean slots=8?"),
        ("node1 slots=0\n", "slots is 0"),
        ("node1 slots=8.5\n", "slots is '8.5'"),
        ("node1 slots=8x\n", "slots is '8x'"),
        ("node1 slots=-1\n", "slots is '-1'"),
        ("node1 slots=٣\n", "it must be a whole number"),
        ("node1 slots = 8\n", "blanks round '='; write node1 slots=8"),
        ("node1 slots=100000000\n", "from 1 to 1024"),
        ("node1 slots=" + "9" * 5000, "from 1 to 1024"),
        ("node1:8\n", "write node1 slots=8"),
        ("node1:2222 slots=8\n", "ports into ~/.ssh/config"),
        ("node1\n", "write node1 slots=8"),
        ("node1 slots=8 slots=4\n", "slots twice"),
        ("node1 slots=8 gpus=4\n", "gpus=4 is not slots=N"),
        ("node1 slots=8\nnode1 slots=4\n", "hosts:2: node1 is named a second time (first in line 1)"),
        ("no_de;rm slots=8\n", "is not a host name"),
        ("@node1 slots=8\n", "is not a user name"),
        ("", "names no hosts"),
        ("# nothing\n\n", "names no hosts"),
        (bytes(range(256)), "is not a text file"),
        (b"node1\x00 slots=8\n", "is not a text file"),
    ],
)
def test_what_cannot_be_is_refused_with_the_line_itself(tmp_path: Path, content: str | bytes, words: str) -> None:
    with pytest.raises(ClusterError) as caught:
        parse(tmp_path, content)
    assert words in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="nowhere cannot be read"):
        parse_hostfile(tmp_path / "nowhere")
    with pytest.raises(ClusterError, match="cannot be read"):
        parse_hostfile(tmp_path)


HOSTS = [Host("node1", 4, 1), Host("node2", 4, 2), Host("fd00::1", 4, 3)]
ALL = [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"node1": ALL, "node2": ALL, "fd00::1": ALL}),
        ({"include": "node1"}, {"node1": ALL}),
        ({"include": "node2@node1:0,2"}, {"node1": [0, 2], "node2": ALL}),
        ({"include": "node1:2,0"}, {"node1": [0, 2]}),
        ({"include": "node1:0,0"}, {"node1": [0]}),
        ({"include": " node1 : 0"}, {"node1": [0]}),
        ({"include": "fd00::1:0"}, {"fd00::1": [0]}),
        ({"exclude": "node1@fd00::1"}, {"node2": ALL}),
        ({"exclude": "node1:0,1,2,3@fd00::1"}, {"node2": ALL}),
        ({"exclude": "node1:1@fd00::1"}, {"node1": [0, 2, 3], "node2": ALL}),
    ],
)
def test_filters(options: dict[str, str], expected: dict[str, list[int]]) -> None:
    left = filter_hosts(HOSTS, **options)
    assert left == expected
    assert list(left) == list(expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"include": "node1:4"}, "node1 has slots 0-3; the number is an id, not a count"),
        ({"include": "node3"}, "'node3' is not in the hostfile"),
        ({"include": "nod1"}, "did you mean node1?"),
        ({"include": "node1:"}, "is not a slot id"),
        ({"include": "node1:a"}, "is not a slot id"),
        ({"include": "node1:0-2"}, "is a range"),
        ({"exclude": "node1@node2@fd00::1"}, "leaves no slot"),
        ({"include": "node1", "exclude": "node2"}, "only one of them"),
    ],
)
def test_filters_that_cannot_be(options: dict[str, str], words: str) -> None:
    with pytest.raises(ClusterError) as caught:
        filter_hosts(HOSTS, **options)
    assert words in str(caught.value)
