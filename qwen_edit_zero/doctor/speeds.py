"""Which node, link or device is slow: by what most of them do, so that one slow one does not move the measure.

A node's best link is what it can do at least; the median of these over nodes is usual. A node whose best link is below
a third of that is slow; between two others, a link below a third is.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence

from qwen_edit_zero.doctor.findings import Finding, Level
from qwen_edit_zero.doctor.links import Measured, Speed
from qwen_edit_zero.doctor.nodes import Node, listed
from qwen_edit_zero.edit_data.wording import byte_count

_TIMES = 3.0  # slower than usual
_LATENCY_TIMES, _LATENCY_MORE = 5.0, 2e-3  # times the usual, and seconds more, that make a latency long
_GIGABIT = 100e6  # bytes a second: no more than what one gigabit carries
_DEVICE_TIMES = {"cuda": 1.4, "cpu": 2.0}  # other work on a CPU is nothing unusual
_READ_TIMES = 4.0
_SHOWN = 6
_ADVICE = "look at its cable, switch port and interface (`ethtool`, `ibstat`), or leave it out"


def judge_links(measured: Measured, nodes: Sequence[Node]) -> list[Finding]:
    """Findings about the network between nodes, and within them."""
    found = [_collective("all-reduce", measured.reduce), _collective("all-gather", measured.gather)]
    found += _within(measured.within, nodes)
    if len(nodes) > 1:
        found += _pairs(measured, [node.name for node in nodes])
    return found


def _collective(name: str, speed: Speed | None) -> Finding:
    if speed is None:
        return Finding("speed", name, Level.UNCHECKED, "there is one rank alone")
    return Finding("speed", name, Level.OK, f"over all ranks: {_told(speed)}")


def _within(within: Mapping[int, Speed], nodes: Sequence[Node]) -> list[Finding]:
    if not within:
        return []
    usual = statistics.median(speed.rate for speed in within.values())
    slow = {n: speed for n, speed in within.items() if speed.rate < usual / _TIMES}
    if slow:
        worst = min(slow, key=lambda n: slow[n].rate)
        text = f"{listed([nodes[n].name for n in slow])}: {_told(slow[worst])}; usual are {byte_count(usual)}/s"
        advice = "look at `nvidia-smi topo -m`, and NCCL_DEBUG=INFO"
        return [Finding("speed", "within a node", Level.WARNING, text, advice)]
    slowest = min(within.values(), key=lambda speed: speed.rate)
    return [
        Finding(
            "speed",
            "within a node",
            Level.OK,
            f"all-reduce: {_told(slowest)}" + (" at least" if len(within) > 1 else ""),
        )
    ]


def _pairs(measured: Measured, names: Sequence[str]) -> list[Finding]:
    pairs = measured.pairs
    if not pairs:
        return [Finding("speed", "pairs of nodes", Level.UNCHECKED, "there was no time for them")]
    slow_nodes, slow_links = slow_ones(pairs, len(names))
    usual = usual_speed(pairs)
    found = []
    for n in slow_nodes:
        of = [speed for pair, speed in pairs.items() if n in pair]
        best = Speed(min(speed.latency for speed in of), max(speed.rate for speed in of))
        text = (
            f"{names[n]} is slow with all {len(of)} nodes that were tried: {_told(best)} at best; usual: {_told(usual)}"
        )
        found.append(Finding("speed", "slow node", Level.WARNING, text, _ADVICE))
    for a, b in slow_links[:_SHOWN]:
        text = f"between {names[a]} and {names[b]}: {_told(pairs[a, b])}; usual: {_told(usual)}"
        found.append(Finding("speed", "slow link", Level.WARNING, text, "look at the way between these two"))
    if len(slow_links) > _SHOWN:
        text = f"and {len(slow_links) - _SHOWN} more; --json has all"
        found.append(Finding("speed", "slow link", Level.WARNING, text))
    tried = f"{len(pairs)} pair{'s' if len(pairs) > 1 else ''}" + (
        f" of {len(names) * (len(names) - 1) // 2}" if len(pairs) < len(names) * (len(names) - 1) // 2 else ""
    )
    text = f"{tried} tried; usual: {_told(usual)} each way at once"
    if usual.rate < _GIGABIT:
        advice = "a gigabit or less: ranks of different nodes will wait for the network; see docs/launch.md, Networks"
        found.append(Finding("speed", "pairs of nodes", Level.WARNING, text, advice))
    else:
        found.append(Finding("speed", "pairs of nodes", Level.OK, text))
    if measured.left_out:
        text = f"{measured.left_out} pairs, for time (--timeout)"
        found.append(Finding("speed", "pairs of nodes", Level.UNCHECKED, text))
    return found


def usual_speed(pairs: Mapping[tuple[int, int], Speed]) -> Speed:
    """The medians, over nodes, of the best that each node has with another."""
    rates, latencies = _best(pairs)
    return Speed(statistics.median(latencies.values()), statistics.median(rates.values()))


def slow_ones(pairs: Mapping[tuple[int, int], Speed], count: int) -> tuple[list[int], list[tuple[int, int]]]:
    """Slow nodes, and slow links between the others, the slowest first. Two nodes alone cannot be told apart."""
    if count < 3:
        return [], []
    rates, latencies = _best(pairs)
    usual = usual_speed(pairs)

    def is_slow(latency: float, rate: float) -> bool:
        late = latency > _LATENCY_TIMES * usual.latency and latency > usual.latency + _LATENCY_MORE
        return rate < usual.rate / _TIMES or late

    nodes = [n for n in rates if is_slow(latencies[n], rates[n])]
    links = [pair for pair, s in pairs.items() if not set(pair) & set(nodes) and is_slow(s.latency, s.rate)]
    return nodes, sorted(links, key=lambda pair: pairs[pair].rate)


def _best(pairs: Mapping[tuple[int, int], Speed]) -> tuple[dict[int, float], dict[int, float]]:
    rates: dict[int, float] = {}
    latencies: dict[int, float] = {}
    for pair, speed in pairs.items():
        for n in pair:
            rates[n] = max(rates.get(n, 0.0), speed.rate)
            latencies[n] = min(latencies.get(n, speed.latency), speed.latency)
    return rates, latencies


def judge_devices(seconds: Sequence[float], hosts: Sequence[str], kind: str) -> Finding:
    """Whether a rank's device is slower than the others at the same work; `seconds` and `hosts` by rank."""
    usual = statistics.median(seconds)
    text = f"the same work takes {usual * 1e3:.3g} ms"
    if len(seconds) == 1:
        return Finding("speed", "device", Level.OK, text)
    slow = [rank for rank, value in enumerate(seconds) if value > _DEVICE_TIMES.get(kind, 2.0) * usual]
    if not slow:
        return Finding("speed", "device", Level.OK, f"{text}, {max(seconds) * 1e3:.3g} ms at most")
    slow.sort(key=lambda rank: -seconds[rank])
    told = ", ".join(f"rank {rank} ({hosts[rank]}) {seconds[rank] / usual:.1f} times as long" for rank in slow[:_SHOWN])
    more = f" and {len(slow) - _SHOWN} more" if len(slow) > _SHOWN else ""
    advice = "is it hot, shared with others, or of another kind?"
    return Finding("speed", "device", Level.WARNING, f"{text}, on {told}{more}", advice)


def judge_reading(rates: Mapping[str, float]) -> Finding:
    """Whether a node reads the model much more slowly than the others; `rates` in bytes a second, by node."""
    usual = statistics.median(rates.values())
    slow = [name for name, rate in rates.items() if rate < usual / _READ_TIMES]
    if slow:
        worst = byte_count(min(rates[name] for name in slow))
        text = f"{listed(slow)}: {worst}/s; usual are {byte_count(usual)}/s"
        return Finding("speed", "reading the model", Level.WARNING, text, "look at its mount of that file system")
    return Finding("speed", "reading the model", Level.OK, f"at least {byte_count(min(rates.values()))}/s a node")


def _told(speed: Speed) -> str:
    return f"{byte_count(speed.rate)}/s, {speed.latency * 1e3:.3g} ms"
