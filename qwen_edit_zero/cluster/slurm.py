"""The compact lists of Slurm: host lists `n[001-004,7]` and task counts `2(x3),1`."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence

from qwen_edit_zero.errors import ClusterError

_MAX_HOSTS = 100_000
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\],]+)")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_NUMBERED = re.compile(r"(.*?)([0-9]+)")
_COUNT = re.compile(r"([0-9]+)(?:\(x([0-9]+)\))?")


def expand_nodelist(nodelist: str) -> list[str]:
    """Return the host names of a Slurm node list, in its order: `n[8-9],m` is n8, n9, m. Zero padding is kept.

    Raises ClusterError if the list is not well formed or names more than 100,000 hosts.
    """
    hosts: list[str] = []
    for item in _split(nodelist):
        choices: list[list[str]] = []
        end = 0
        for match in _PART.finditer(item):
            if match.start() != end:
                raise _bad(nodelist)
            end = match.end()
            choices.append([match[2]] if match[2] is not None else _expand_ranges(match[1], nodelist))
        if not item or end != len(item):
            raise _bad(nodelist)
        total = len(hosts)
        for choice in choices:
            total = len(hosts) + (total - len(hosts) or 1) * len(choice)
        if total > _MAX_HOSTS:
            raise ClusterError(f"the Slurm node list {nodelist!r} names more than {_MAX_HOSTS} hosts")
        hosts += ["".join(parts) for parts in itertools.product(*choices)]
    return hosts


def compress_nodelist(names: Sequence[str]) -> str:
    """Return a node list that `expand_nodelist` takes apart into `names`, in their order: n8, n9, m is `n[8-9],m`."""
    parts: list[tuple[str, list[tuple[str, str]]]] = []  # a prefix, and ranges of the digits behind it
    for name in names:
        match = _NUMBERED.fullmatch(name)
        prefix, digits = (match[1], match[2]) if match else (name, "")
        if digits and parts and parts[-1][0] == prefix and parts[-1][1]:
            low, high = parts[-1][1][-1]
            if len(digits) == len(high) and int(digits) == int(high) + 1:
                parts[-1][1][-1] = (low, digits)
            else:
                parts[-1][1].append((digits, digits))
        else:
            parts.append((prefix, [(digits, digits)] if digits else []))
    shown = []
    for prefix, ranges in parts:
        if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
            shown.append(prefix + ranges[0][0])
        elif ranges:
            shown.append(f"{prefix}[{','.join(low if low == high else f'{low}-{high}' for low, high in ranges)}]")
        else:
            shown.append(prefix)
    return ",".join(shown)


def _split(nodelist: str) -> list[str]:
    """Split at the commas outside brackets."""
    items, start, depth = [], 0, 0
    for i, char in enumerate(nodelist):
        depth += {"[": 1, "]": -1}.get(char, 0)
        if depth not in (0, 1):
            raise _bad(nodelist)
        if char == "," and depth == 0:
            items.append(nodelist[start:i])
            start = i + 1
    if depth:
        raise _bad(nodelist)
    return [*items, nodelist[start:]]


def _expand_ranges(text: str, nodelist: str) -> list[str]:
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _bad(nodelist)
        low, high = match[1], match[2] or match[1]
        if int(high) < int(low) or int(high) - int(low) >= _MAX_HOSTS:
            raise _bad(nodelist)
        numbers += [str(n).zfill(len(low)) for n in range(int(low), int(high) + 1)]
    return numbers


def _bad(nodelist: str) -> ClusterError:
    return ClusterError(f"the Slurm node list {nodelist!r} is not well formed; one like n[001-004,7],m1 is expected")


def expand_tasks_per_node(value: str, nodes: int | None = None) -> list[int]:
    """Return the tasks of each node: `2(x3),1` is [2, 2, 2, 1].

    Raises ClusterError if the text is not well formed, or is not about `nodes` nodes.
    """
    counts: list[int] = []
    for part in value.split(","):
        match = _COUNT.fullmatch(part)
        if match is None or int(match[2] or 1) > _MAX_HOSTS:
            raise ClusterError(f"SLURM_TASKS_PER_NODE is {value!r}; something like 2(x3),1 is expected")
        counts += [int(match[1])] * int(match[2] or 1)
    if nodes is not None and len(counts) != nodes:
        raise ClusterError(f"SLURM_TASKS_PER_NODE is {value!r}, which is {len(counts)} nodes, but there are {nodes}")
    return counts
