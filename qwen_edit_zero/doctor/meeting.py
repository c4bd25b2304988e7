"""Who has come: each rank says so in the job's store, and rank 0 names those that have not when time is up."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import torch
from torch._C._distributed_c10d import Store

from qwen_edit_zero.cluster.identity import Identity
from qwen_edit_zero.cluster.slurm import expand_nodelist, expand_tasks_per_node
from qwen_edit_zero.doctor import network
from qwen_edit_zero.doctor.nodes import group_nodes, listed, node_key, odd_nodes, told_apart
from qwen_edit_zero.errors import ClusterError

_HERE, _GO, _COUNT = "doctor/here/", "doctor/go", "doctor/count"
_POLL_SECONDS = 0.1
_MORE_SECONDS = 60  # that ranks wait longer than rank 0, which then tells them


class RollCall:
    """For `process_group.start(met=...)`: returns when all ranks have come, within `seconds`, with devices alike.

    Raises ClusterError on rank 0, which names who is missing, or whose device is unlike the others'.
    """

    def __init__(self, identity: Identity, device: torch.device, seconds: float) -> None:
        self._identity, self._device, self._seconds = identity, device, seconds

    def __call__(self, store: Store) -> None:
        """See the class; collective."""
        rank, world = self._identity.rank, self._identity.world_size
        if world == 1:
            return
        store.set(f"{_HERE}{rank}", json.dumps([node_key(), self._device.type, _loopback(self._device)]))
        store.add(_COUNT, 1)
        if rank:
            store.wait([_GO], timedelta(seconds=self._seconds + _MORE_SECONDS))
            return
        until = time.monotonic() + self._seconds
        while store.add(_COUNT, 0) < world:
            if time.monotonic() > until:
                raise ClusterError(_absence(store, world, self._seconds))
            time.sleep(_POLL_SECONDS)
        told = [json.loads(value) for value in store.multi_get([f"{_HERE}{rank}" for rank in range(world)])]
        keys, devices, loops = zip(*told, strict=True)
        _check_devices(keys, devices)
        _check_interfaces(keys, loops)
        store.set(_GO, "1")


def _check_devices(keys: Sequence[str], devices: Sequence[str]) -> None:
    by_node = {node.name: devices[node.leader] for node in group_nodes(keys)}
    if len(by_node) > 1 and odd_nodes(by_node):
        raise ClusterError(
            f"ranks compute on different devices: {told_apart(by_node)}; they could not meet. Look at `nvidia-smi` "
            "there, or set engine.device=cpu for all"
        )


def _loopback(device: torch.device) -> str:
    """The interface that this rank would use, if that is loopback; else empty."""
    interface = network.look("nccl" if device.type == "cuda" else "gloo", os.environ)
    return interface.name if interface.address and interface.is_loopback else ""


def _check_interfaces(keys: Sequence[str], loops: Sequence[str]) -> None:
    nodes = group_nodes(keys)
    wrong = [node.name for node in nodes if loops[node.leader]]
    if wrong and len(nodes) > 1:
        raise ClusterError(
            f"{listed(wrong)} would use the interface {max(loops)}, over which no other node is reached; look at "
            "NCCL_SOCKET_IFNAME and GLOO_SOCKET_IFNAME, and at `ip addr` there"
        )


def _absence(store: Store, world: int, seconds: float) -> str:
    keys: dict[int, str] = {}
    for rank in range(world):
        if store.check([f"{_HERE}{rank}"]):
            keys[rank] = json.loads(store.get(f"{_HERE}{rank}"))[0]
    return absence_text(keys, world, seconds, rank_hosts(os.environ))


def absence_text(keys: Mapping[int, str], world: int, seconds: float, hosts: Callable[[int], str]) -> str:
    """What is said of ranks that have not come; `keys`: `node_key` by rank of those that have."""
    missing = [rank for rank in range(world) if rank not in keys]
    places = list(dict.fromkeys(host for rank in missing if (host := hosts(rank))))
    where = f", on {listed(places)}" if places else ""
    there = [key.split("|")[0] for key in keys.values()]
    came = {host: there.count(host) for host in dict.fromkeys(there)}
    shown = ", ".join(f"{count} on {host}" for host, count in list(came.items())[:16])
    more = f" and {len(came) - 16} more nodes" if len(came) > 16 else ""
    noun = "rank" if len(missing) == 1 else "ranks"
    return (
        f"{len(missing)} of {world} ranks have not come within {seconds:.0f} s: {noun} {_ranges(missing)}{where}. "
        f"Those that have: {shown}{more}. Look at what the missing ones say; were they started, do they "
        "reach this node (firewall, interface; docs/launch.md)? --timeout waits longer"
    )


def rank_hosts(environ: Mapping[str, str]) -> Callable[[int], str]:
    """The host of a rank as far as the scheduler tells; empty texts where none does."""
    hosts: list[str] = []
    with suppress(ClusterError, KeyError):
        names = expand_nodelist(environ.get("SLURM_STEP_NODELIST") or environ["SLURM_JOB_NODELIST"])
        counts = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ["SLURM_TASKS_PER_NODE"]
        for name, count in zip(names, expand_tasks_per_node(counts, len(names)), strict=True):
            hosts += [name] * count
    return lambda rank: hosts[rank] if rank < len(hosts) else ""


def _ranges(ranks: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ", ".join("-".join(map(str, part)) for part in parts)
