"""Pairs of nodes: who is tried with whom, what is measured, and what is called slow."""

from __future__ import annotations

import random
import statistics
from itertools import combinations

import pytest
import torch

from qwen_edit_zero.doctor.findings import Level
from qwen_edit_zero.doctor.links import Measured, Speed, measure, rounds
from qwen_edit_zero.doctor.nodes import Node
from qwen_edit_zero.doctor.speeds import judge_devices, judge_links, judge_reading, slow_ones
from tests.ranks import run_ranks


@pytest.mark.parametrize("count", [2, 3, 4, 7, 8, 16])
def test_up_to_16_nodes_every_pair_is_tried_once(count: int) -> None:
    turns = rounds(count)
    assert sorted(pair for turn in turns for pair in turn) == list(combinations(range(count), 2))
    assert all(len({n for pair in turn for n in pair}) == 2 * len(turn) for turn in turns)


@pytest.mark.parametrize("count", [17, 64, 65, 512])
def test_of_more_nodes_each_is_tried_with_some_others(count: int) -> None:
    turns = rounds(count)
    partners: dict[int, set[int]] = {n: set() for n in range(count)}
    for turn in turns:
        assert len({n for pair in turn for n in pair}) == 2 * len(turn)
        for a, b in turn:
            partners[a].add(b)
            partners[b].add(a)
    assert len(turns) <= 18
    assert min(map(len, partners.values())) >= len(turns) - 1 >= 8


def usual(rng: random.Random) -> Speed:
    return Speed(50e-6 * rng.uniform(0.8, 1.3), 10e9 * rng.uniform(0.7, 1.2))


def network(count: int, slow_node: int | None, slow_link: tuple[int, int] | None) -> dict[tuple[int, int], Speed]:
    rng = random.Random(1)
    pairs = {pair: usual(rng) for turn in rounds(count) for pair in turn}
    for pair in pairs:
        if pair == slow_link or slow_node in pair:
            pairs[pair] = Speed(pairs[pair].latency, 1e9)
    return pairs


@pytest.mark.parametrize("count", [3, 4, 16, 64])
def test_a_slow_node_is_told_from_a_slow_link(count: int) -> None:
    assert slow_ones(network(count, None, None), count) == ([], [])
    assert slow_ones(network(count, 2, None), count) == ([2], [])
    link = rounds(count)[0][0]
    assert slow_ones(network(count, None, link), count) == ([], [link])


def test_late_answers_are_slow_too() -> None:
    pairs = {(0, 1): Speed(1e-4, 1e9), (0, 2): Speed(2e-2, 1e9), (1, 2): Speed(2e-2, 1e9)}
    assert slow_ones(pairs, 3) == ([2], [])


def test_of_two_nodes_only_a_slow_network_can_be_told() -> None:
    nodes = [Node("node1", (0,)), Node("node2", (1,))]
    fast, slow = (Measured(None, None, {}, {(0, 1): Speed(1e-4, rate)}) for rate in (5e9, 2e7))
    assert [f.level for f in judge_links(fast, nodes) if f.name == "pairs of nodes"] == [Level.OK]
    (found,) = [f for f in judge_links(slow, nodes) if f.name == "pairs of nodes"]
    assert (found.level, found.text) == (Level.WARNING, "1 pair tried; usual: 20 MB/s, 0.1 ms each way at once")


def test_slow_nodes_and_links_are_named_in_words() -> None:
    nodes = [Node(f"node{n + 1}", (n,)) for n in range(4)]
    measured = Measured(None, None, {}, network(4, 3, (0, 1)))
    texts = {f.name: f.text for f in judge_links(measured, nodes)}
    assert texts["slow node"].startswith("node4 is slow with all 3 nodes that were tried: 1 GB/s, ")
    assert texts["slow link"].startswith("between node1 and node2: 1 GB/s, ")


def test_a_slow_device_and_a_slow_reader_are_named() -> None:
    found = judge_devices([1.0, 1.0, 1.0, 2.5], ["a", "a", "b", "b"], "cuda")
    assert (found.level, found.text) == (
        Level.WARNING,
        "the same work takes 1e+03 ms, on rank 3 (b) 2.5 times as long",
    )
    assert judge_devices([1.0, 1.3], ["a", "b"], "cuda").level is Level.OK
    assert judge_reading({"a": 1e9, "b": 1e9, "c": 1e8}).text == "c: 100 MB/s; usual are 1 GB/s"


def measured_by(rank: int, world: int) -> Measured:
    nodes = [Node("a", (0, 1)), Node("b", (2,))]
    return measure(nodes, rank, torch.device("cpu"), 5.0)


def test_all_ranks_know_what_was_measured() -> None:
    """Three ranks, two of them on one node."""
    first, *others = run_ranks(measured_by, 3)
    assert others == [first, first] or all(found.pairs == first.pairs for found in others)
    assert list(first.pairs) == [(0, 1)]
    assert list(first.within) == [0]
    speeds = [*first.pairs.values(), *first.within.values(), first.reduce, first.gather]
    assert all(speed.rate > 1e5 and 0 < speed.latency < 10 for speed in speeds)
    assert statistics.median(speed.rate for speed in speeds) < 1e12
