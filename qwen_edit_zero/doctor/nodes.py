"""Which ranks share a node, and which nodes are unlike the others."""

from __future__ import annotations

import os
import socket
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from qwen_edit_zero.cluster.slurm import compress_nodelist

V = TypeVar("V", bound=Hashable)
_SHOWN = 80  # characters of a list of names or of a value


@dataclass(frozen=True)
class Node:
    """A machine, or a container with a network of its own. `ranks` in order; the first one speaks for it."""

    name: str
    ranks: tuple[int, ...]

    @property
    def leader(self) -> int:
        """The rank that speaks for the node."""
        return self.ranks[0]


def node_key() -> str:
    """What all processes of this node have in common, and no other node has. Starts with the host name and a `|`."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        network = os.stat("/proc/self/ns/net").st_ino
    except OSError:
        boot, network = "", 0
    return f"{socket.gethostname()}|{boot}|{network}"


def group_nodes(keys: Sequence[str]) -> list[Node]:
    """The nodes of the ranks whose `node_key` these are, by their first rank. Equal host names get a number."""
    ranks: dict[str, list[int]] = {}
    for rank, key in enumerate(keys):
        ranks.setdefault(key, []).append(rank)
    count = Counter(key.split("|")[0] for key in ranks)
    seen: Counter[str] = Counter()
    nodes = []
    for key, members in ranks.items():
        host = key.split("|")[0]
        seen[host] += 1
        nodes.append(Node(host if count[host] == 1 else f"{host}#{seen[host]}", tuple(members)))
    return nodes


def listed(names: Sequence[str]) -> str:
    """`node[1-8]`: names, shortened where they are many."""
    text = compress_nodelist(names)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}... ({len(names)} nodes)"


def most_have(values: Mapping[str, V]) -> V:
    """The value of most nodes; of several the one that comes first."""
    (value, _), *_ = Counter(values.values()).most_common(1)
    return value


def odd_nodes(values: Mapping[str, V]) -> list[str]:
    """Nodes that have not what most have."""
    usual = most_have(values)
    return [name for name, value in values.items() if value != usual]


def told_apart(values: Mapping[str, V]) -> str:
    """`2.12 on node3, 2.13 on the 7 others`: the odd nodes first. `values` by node, at least two different ones."""
    usual = most_have(values)
    parts = []
    for value in dict.fromkeys(v for v in values.values() if v != usual):
        parts.append(f"{_short(value)} on {listed([name for name, v in values.items() if v == value])}")
    others = [name for name, v in values.items() if v == usual]
    parts.append(f"{_short(usual)} on " + (others[0] if len(others) == 1 else f"the {len(others)} others"))
    return ", ".join(parts)


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]}...{text[-_SHOWN // 2 :]}"
