"""The collected odd cases of Slurm's variables and of hostfiles (cases/), each with what must come of it."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from qwen_edit_zero.cluster.hostfile import filter_hosts, parse_hostfile
from qwen_edit_zero.cluster.identity import discover
from qwen_edit_zero.cluster.slurm import expand_nodelist, expand_tasks_per_node
from qwen_edit_zero.errors import ClusterError

CASES = Path(__file__).parent / "cases"


def entries(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads((CASES / "slurm" / name).read_text())
    return found


@pytest.mark.parametrize("case", entries("nodelists.json"), ids=lambda case: case["nodelist"])
def test_node_lists(case: dict[str, Any]) -> None:
    if case["expect"] is None:
        with pytest.raises(ClusterError):
            expand_nodelist(case["nodelist"])
    else:
        assert expand_nodelist(case["nodelist"]) == case["expect"]


@pytest.mark.parametrize("case", entries("tasks_per_node.json"), ids=lambda case: repr(case["value"]))
def test_task_counts(case: dict[str, Any]) -> None:
    if case["expect"] is None:
        with pytest.raises(ClusterError):
            expand_tasks_per_node(case["value"], case["nodes"])
    else:
        assert expand_tasks_per_node(case["value"], case["nodes"]) == case["expect"]


REFUSED = {
    "ntasks_less_than_per_node": "1 task in all but 2 a node",
    "interactive_allocation_no_srun": "started without srun",
    "rank_not_number": "RANK is ''",
    "rank_out_of_range": "rank must be less than the world size",
}
# What the other cases must give is told by these tests
ELSEWHERE = {
    "gpus_4_5_visible": "test_process_group.py, test_deepspeed_launch.py",
    "no_gpu_visible": "test_process_group.py",
    "node_order": "below",
    "mpi_inside_slurm": "below",
}


@pytest.mark.parametrize("case", entries("environments.json"), ids=lambda case: case["name"])
def test_environments(case: dict[str, Any]) -> None:
    if case["name"] in REFUSED:
        with pytest.raises(ClusterError, match=REFUSED[case["name"]]):
            discover(case["env"])
    else:
        assert case["name"] in ELSEWHERE


def test_rank_0_is_on_the_first_node_of_the_list_that_slurm_sorted() -> None:
    env = next(case["env"] for case in entries("environments.json") if case["name"] == "node_order")
    tasks = {"SLURM_PROCID": "2", "SLURM_NTASKS": "3", "SLURM_LOCALID": "0", "SLURM_NODEID": "2", "SLURM_NNODES": "3"}
    found = discover(env | tasks | {"SLURM_STEP_ID": "0", "SLURM_TASKS_PER_NODE": "1(x3)", "SLURM_JOB_ID": "4"})
    assert (found.master_addr, found.rank) == ("n583", 2)


def test_mpi_wins_over_the_one_slurm_task_that_started_it_and_both_are_told() -> None:
    env = next(case["env"] for case in entries("environments.json") if case["name"] == "mpi_inside_slurm")
    found = discover(env)
    assert (found.launcher, found.rank, found.world_size, found.local_rank) == ("openmpi", 1, 4, 1)
    assert "Slurm says task 0 of 1" in found.note


BOTH = [("node1", 8), ("node2", 8)]
HOSTFILES: dict[str, list[tuple[str, int]] | str] = {
    "ok": BOTH,
    "comment_line": BOTH,
    "comment_after": BOTH,
    "blank_lines": BOTH,
    "crlf": BOTH,
    "bom": BOTH,
    "no_final_newline": BOTH,
    "leading_blanks": [("node1", 8)],
    "slots_typo": ":2: 'node2 lots=8'",
    "slots_zero": ":1: 'node1 slots=0': slots is 0",
    "slots_float": ":1: 'node1 slots=8.5': slots is '8.5'",
    "slots_trailing_junk": ":1: 'node1 slots=8x': slots is '8x'",
    "slots_spaces": ":1: 'node1 slots = 8' has blanks round '='; write node1 slots=8",
    "slots_huge": ":1: 'node1 slots=100000000': slots is 100000000; it must be from 1 to 1024",
    "openmpi_style": [("node1", 4), ("node2", 4)],
    "mpich_style": ":1: 'node1:8': node1:8 is the form of MPICH",
    "user_at_host": [("10.0.0.1", 2)],
    "ipv4": [("10.0.0.1", 8), ("10.0.0.2", 8)],
    "host_port": "put ports into ~/.ssh/config",
    "fqdn_dash": [("gpu-node-01.example.test", 8)],
    "order": [("node2", 2), ("node1", 2)],
    "empty": "names no hosts",
    "binary": "is not a text file",
}


@pytest.mark.parametrize("file", sorted((CASES / "hostfiles").iterdir()), ids=lambda file: file.name)
def test_hostfiles(file: Path) -> None:
    if file.suffix == ".tsv":
        return
    expected = HOSTFILES[file.name]
    if isinstance(expected, str):
        with pytest.raises(ClusterError) as caught:
            parse_hostfile(file)
        assert str(file) in str(caught.value)
        assert expected in str(caught.value)
    else:
        assert [(host.name, host.slots) for host in parse_hostfile(file)] == expected


ALL = [0, 1, 2, 3]
FILTERS: dict[str, dict[str, list[int]] | str] = {
    "--include node1": {"node1": ALL},
    "--include node1:0,2@node2": {"node1": [0, 2], "node2": ALL},
    "--include node1:2,0": {"node1": [0, 2]},
    "--include node1:0,0": {"node1": [0]},
    "--include node1:4": "node1 has slots 0-3; the number is an id, not a count",
    "--include node3": "'node3' is not in the hostfile",
    "--exclude node1": {"node2": ALL},
    "--exclude node1:0,1,2,3": {"node2": ALL},
    "--exclude node1@node2": "leaves no slot",
    "--include node1 --exclude node2": "only one of them",
    "--include node1:": "is not a slot id",
    "--include node1:a": "is not a slot id",
    "--include node1:0-2": "is a range",
    "--include ' node1 : 0'": {"node1": [0]},
    "--include fd00::1:0": {"fd00::1": [0]},
}


@pytest.mark.parametrize(
    "line", (CASES / "hostfiles" / "FILTERS.tsv").read_text().splitlines()[1:], ids=lambda line: line.split("\t")[0]
)
def test_filters(line: str, tmp_path: Path) -> None:
    text = line.split("\t")[0]
    words = shlex.split(text)
    given = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=True)}
    hosts = tmp_path / "hosts"
    hosts.write_text("node1 slots=4\nnode2 slots=4\n" + ("fd00::1 slots=4\n" if "fd00" in text else ""))
    expected = FILTERS[text]
    if isinstance(expected, str):
        with pytest.raises(ClusterError, match=expected):
            filter_hosts(parse_hostfile(hosts), **given)
    else:
        assert filter_hosts(parse_hostfile(hosts), **given) == expected
