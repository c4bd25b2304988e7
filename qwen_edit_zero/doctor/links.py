"""Timed collectives over all ranks, within nodes, and exchanges between pairs of nodes.

Every pair of up to 16 nodes is tried; of more, each node with about twice log2(n) others, in rounds in which no node is
in two pairs. Sizes grow until a transfer takes long enough to be timed, so that a slow link costs a second or two.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from qwen_edit_zero.cluster.collectives import gather_objects
from qwen_edit_zero.doctor.nodes import Node

ALL_PAIRS = 16  # nodes up to which every pair is tried
_FIRST, _FACTOR = 64 << 10, 8  # bytes, and how they grow
_MOST = {"cuda": 256 << 20, "cpu": 32 << 20}
_ENOUGH_SECONDS = 0.05
_LATENCY_TRIES = 5


@dataclass(frozen=True)
class Speed:
    """`latency` in seconds of a transfer of a few bytes; `rate` in bytes a second that pass through a rank's link."""

    latency: float
    rate: float


@dataclass(frozen=True)
class Measured:
    """What was measured, by number of node; pairs (a, b) with a < b. `left_out` pairs were not tried, for time."""

    reduce: Speed | None
    gather: Speed | None
    within: dict[int, Speed]
    pairs: dict[tuple[int, int], Speed]
    left_out: int = 0


def measure(nodes: Sequence[Node], rank: int, device: torch.device, seconds: float) -> Measured:
    """Measure everything; collective. `seconds`: after which no further round of pairs begins. On every rank."""
    world = sum(len(node.ranks) for node in nodes)
    if world == 1:
        return Measured(None, None, {}, {})
    own = next(number for number, node in enumerate(nodes) if rank in node.ranks)
    reduce = _timed(lambda size: _all_reduce(size, device, None), None, device, 2 * (world - 1) / world)
    gather = _timed(lambda size: _all_gather(size, device, world), None, device, (world - 1) / world)
    mine: dict[str, object] = {}
    members = list(nodes[own].ranks)
    if any(len(node.ranks) > 1 for node in nodes):
        # Each rank makes its own node's group at once: NCCL splits its communicator, in which all ranks must take part
        group = dist.new_group(members, use_local_synchronization=True)
        if len(members) > 1:
            share = 2 * (len(members) - 1) / len(members)
            mine["within"] = _timed(lambda size: _all_reduce(size, device, group), group, device, share)
    if len(nodes) > 1:
        leaders = [node.leader for node in nodes]
        between = dist.new_group(leaders)
        if rank in leaders:
            mine["pairs"], mine["left_out"] = _pairs(leaders, own, between, device, seconds)
    everyone = gather_objects(mine)
    within = {n: found for n, node in enumerate(nodes) if (found := everyone[node.leader].get("within"))}
    pairs: dict[tuple[int, int], Speed] = {}
    for node in nodes:
        pairs |= everyone[node.leader].get("pairs", {})
    return Measured(reduce, gather, within, dict(sorted(pairs.items())), everyone[nodes[0].leader].get("left_out", 0))


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """Rounds of pairs of `count` nodes, each node at most once a round: a round-robin tournament by the circle method.
    All rounds up to ALL_PAIRS nodes; of more nodes evenly chosen ones."""
    even = count + count % 2
    number = even - 1
    chosen: Sequence[int] = range(number)
    if count > ALL_PAIRS:
        wanted = min(number, 2 * math.ceil(math.log2(count)))
        chosen = [number * i // wanted for i in range(wanted)]
    found = []
    for turn in chosen:
        seats = [0, *((turn + i) % number + 1 for i in range(number))]
        pairs = [(seats[i], seats[even - 1 - i]) for i in range(even // 2)]
        found.append(sorted((min(a, b), max(a, b)) for a, b in pairs if max(a, b) < count))
    return found


def _pairs(
    leaders: Sequence[int], own: int, group: dist.ProcessGroup, device: torch.device, seconds: float
) -> tuple[dict[tuple[int, int], Speed], int]:
    """What this leader measured with others (told by the lower of the two), and how many pairs were left out."""
    began, found, left = time.monotonic(), {}, 0
    _all_reduce(4, device, group)  # connects all of them
    for turn in rounds(len(leaders)):
        if _most(time.monotonic() - began, group, device) > seconds:
            left += len(turn)
            continue
        pair = next((pair for pair in turn if own in pair), None)
        if pair is None:
            continue
        other = pair[1] if pair[0] == own else pair[0]
        exchange = _Exchange(leaders[other], group, device)
        speed = _grown(exchange.seconds, exchange.most, device, 1.0)
        if own < other:
            found[pair] = speed
    return found, left


class _Exchange:
    """Both sides of a pair send to each other at once."""

    def __init__(self, peer: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self._peer, self._group, self._device = peer, group, device

    def seconds(self, size: int) -> float:
        """How long `size` bytes take, both ways at once."""
        count = max(1, size // 4)
        out, into = (torch.zeros(count, device=self._device) for _ in range(2))
        return _clock(lambda: self._swap(out, into), self._device)

    def most(self, seconds: float) -> float:
        """The larger of both sides' numbers."""
        out = torch.tensor([seconds], device=self._device)
        into = torch.zeros_like(out)
        self._swap(out, into)
        return max(seconds, float(into.item()))

    def _swap(self, out: torch.Tensor, into: torch.Tensor) -> None:
        operations = [
            dist.P2POp(dist.isend, out, self._peer, self._group),
            dist.P2POp(dist.irecv, into, self._peer, self._group),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()


def _timed(run: Callable[[int], float], group: dist.ProcessGroup | None, device: torch.device, share: float) -> Speed:
    return _grown(run, lambda seconds: _most(seconds, group, device), device, share)


def _grown(run: Callable[[int], float], most: Callable[[float], float], device: torch.device, share: float) -> Speed:
    """Measure with growing sizes; `share` of them passes through a rank's link. `most` agrees on a time."""
    run(4)  # connects
    latency = most(min(run(4) for _ in range(_LATENCY_TRIES)))
    for size in _sizes(device):
        seconds = most(run(size))
        if seconds > _ENOUGH_SECONDS:
            break
    if seconds < 10 * _ENOUGH_SECONDS:  # another try, since something else may have been in the way
        seconds = min(seconds, most(run(size)))
    return Speed(latency, share * size / max(seconds - latency, 1e-9))


def _sizes(device: torch.device) -> Iterator[int]:
    size, most = _FIRST, _MOST.get(device.type, _MOST["cpu"])
    while size < most:
        yield size
        size *= _FACTOR
    yield most


def _all_reduce(size: int, device: torch.device, group: dist.ProcessGroup | None) -> float:
    values = torch.zeros(max(1, size // 4), device=device)
    return _clock(lambda: dist.all_reduce(values, group=group), device)


def _all_gather(size: int, device: torch.device, world: int) -> float:
    share = torch.zeros(max(1, size // 4 // world), device=device)
    whole = list(torch.empty(len(share) * world, device=device).chunk(world))
    return _clock(lambda: dist.all_gather(whole, share), device)


def _most(seconds: float, group: dist.ProcessGroup | None, device: torch.device) -> float:
    value = torch.tensor([seconds], device=device)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=group)
    return float(value.item())


def _clock(work: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    began = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - began
