"""Lists of hosts in the forms of other launchers."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_edit_zero.cluster.hostfile import Host
from qwen_edit_zero.cluster.hostlists import read_hosts, written
from qwen_edit_zero.cluster.slurm import compress_nodelist, expand_nodelist
from qwen_edit_zero.errors import ClusterError

HOSTS = [Host("node1", 8, 1), Host("node2", 8, 2, "alice"), Host("node3", 8, 3)]
UNEVEN = [Host("node1", 8, 1), Host("node2", 4, 2)]


@pytest.mark.parametrize(
    ("names", "listed"),
    [
        ("node1 node2 node3", "node[1-3]"),
        ("n001 n002 n4", "n[001-002,4]"),
        ("n9 n10", "n[9,10]"),
        ("n2 n1", "n[2,1]"),
        ("a b7 c", "a,b7,c"),
        ("r1n1 r1n2 r2n1", "r1n[1-2],r2n1"),
        ("10.0.0.1 10.0.0.2", "10.0.0.[1-2]"),
    ],
)
def test_node_lists_are_compressed(names: str, listed: str) -> None:
    assert compress_nodelist(names.split()) == listed


NAME = st.from_regex(r"[a-z][a-z0-9-]{0,6}[a-z0-9]", fullmatch=True)


@given(st.lists(st.one_of(NAME, st.integers(1, 30).map("n{}".format), st.integers(1, 30).map("n{:03}".format))))
def test_what_is_compressed_expands_to_the_same(names: list[str]) -> None:
    if names:
        assert expand_nodelist(compress_nodelist(names)) == names


@pytest.mark.parametrize("form", ["deepspeed", "openmpi", "mpich", "slurm"])
def test_each_form_is_read_as_it_was_written(form: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    text = written(HOSTS, form)
    file.write_text(text.split("--nodelist=")[1].split()[0] if form == "slurm" else text)
    read = read_hosts(file, form, slots=8 if form == "slurm" else None)
    assert [(host.name, host.slots) for host in read] == [(host.name, host.slots) for host in HOSTS]


def test_what_is_written() -> None:
    assert written(HOSTS[:2], "deepspeed") == "node1 slots=8\nalice@node2 slots=8\n"
    assert written(HOSTS[:2], "openmpi") == "node1 slots=8\nnode2 slots=8\n"
    assert written(HOSTS[:2], "mpich") == "node1:8\nnode2:8\n"
    assert written(HOSTS, "slurm") == "--nodes=3 --nodelist=node[1-3] --ntasks-per-node=8 --gpus-per-node=8\n"
    assert written(UNEVEN, "torchrun") == (
        "node1: --nnodes 2 --node_rank 0 --nproc_per_node 8 --master_addr node1 --master_port 29500\n"
        "node2: --nnodes 2 --node_rank 1 --nproc_per_node 4 --master_addr node1 --master_port 29500\n"
    )


def test_what_a_form_cannot_say_is_refused() -> None:
    with pytest.raises(ClusterError, match="node1 has 8 slots and node2 4"):
        written(UNEVEN, "slurm")
    with pytest.raises(ClusterError, match="IPv6"):
        written([Host("fd00::1", 2, 1)], "mpich")


@pytest.mark.parametrize(
    ("form", "slots", "text", "words"),
    [
        ("mpich", None, "node1:8\nnode2\n", ":2: 'node2' is not HOST:N"),
        ("mpich", None, "node1:8\nnode1:8\n", ":2: node1 is named a second time (first in line 1)"),
        ("mpich", None, "node1:0\n", "slots is 0"),
        ("mpich", None, "# none\n", "names no hosts"),
        ("slurm", None, "n[1-2]", "add --slots"),
        ("slurm", 8, "n[1-", "not well formed"),
        ("slurm", 8, "n1,n1", "n1 is named a second time"),
        ("slurm", 8, "", "names no hosts"),
        ("deepspeed", 8, "node1 slots=8", "--slots is for --from slurm"),
    ],
)
def test_lists_that_are_wrong_are_refused(form: str, slots: int | None, text: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "hosts"
    file.write_text(text)
    with pytest.raises(ClusterError) as caught:
        read_hosts(file, form, slots=slots)
    assert words in str(caught.value)
