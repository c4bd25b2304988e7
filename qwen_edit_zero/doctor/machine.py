"""What a node has beside its GPUs: cores, memory, /dev/shm, limits; and whether that is enough for its ranks."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from qwen_edit_zero.doctor.findings import Finding, Level
from qwen_edit_zero.doctor.needs import Needs
from qwen_edit_zero.doctor.nodes import Node, listed, odd_nodes, told_apart
from qwen_edit_zero.edit_data.wording import byte_count

_SHM = 512 * 10**6  # bytes with which NCCL and data of several ranks get along
_FILES_A_RANK = 4  # sockets to each other rank: of groups of gloo, the store, its watch
_FILES_BESIDE = 512  # data, shards, libraries
_SERVED_A_RANK, _SERVED_BESIDE = 2, 128  # connections of each rank to the store, which rank 0 serves
_INFINIBAND = Path("/sys/class/infiniband")


@dataclass(frozen=True)
class Machine:
    """One node. Memory and /dev/shm in bytes; `locked` is the limit of locked memory, -1 if there is none."""

    cores: int
    threads: int
    memory_free: int
    shm_free: int
    open_files: int
    locked: int
    infiniband: bool


def look(proc: Path = Path("/proc"), shm: Path = Path("/dev/shm")) -> Machine:
    """This node."""
    files, locked = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_MEMLOCK))
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        threads=torch.get_num_threads(),
        memory_free=_free_memory(proc),
        shm_free=shutil.disk_usage(shm).free if shm.is_dir() else 0,
        open_files=files,
        locked=locked,
        infiniband=_INFINIBAND.is_dir() and any(_INFINIBAND.iterdir()),
    )


def _free_memory(proc: Path) -> int:
    """What the kernel says is available, or what the container may still take if that is less."""
    lines = (proc / "meminfo").read_text(encoding="utf-8").splitlines()
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), 0)
    group = Path("/sys/fs/cgroup")
    try:
        most = (group / "memory.max").read_text(encoding="utf-8").strip()
        if most != "max":
            free = min(free, int(most) - int((group / "memory.current").read_text(encoding="utf-8")))
    except (OSError, ValueError):
        pass
    return free


def judge(
    machines: Mapping[str, Machine], nodes: Sequence[Node], needs: Needs | None, *, on_gpus: bool, asynchronous: bool
) -> list[Finding]:
    """Findings about nodes, by name."""
    ranks = {node.name: len(node.ranks) for node in nodes}
    world = sum(ranks.values())
    found = [_alike("ranks a node", ranks)]

    def add(name: str, bad: Mapping[str, str], level: Level, advice: str, good: str) -> None:
        if bad:
            (text, *_), where = list(bad.values()), listed(list(bad))
            found.append(Finding("machines", name, level, f"{text} (on {where})", advice))
        else:
            found.append(Finding("machines", name, Level.OK, good))

    over = {
        name: f"{ranks[name]} ranks of {machine.threads} threads each on {machine.cores} cores"
        for name, machine in machines.items()
        if machine.threads * ranks[name] > machine.cores
    }
    fewest = min(machine.cores for machine in machines.values())
    add("cores", over, Level.WARNING, "lower OMP_NUM_THREADS, or the ranks a node", f"at least {fewest} a node")
    if needs is not None and asynchronous:
        # a checkpoint is written from a copy in host memory, each rank's share of it
        share = {name: needs.checkpoint_bytes * ranks[name] // world for name in machines}
        short = {
            name: f"{byte_count(machine.memory_free)} of memory free; a checkpoint's copy takes "
            f"{byte_count(share[name])} a node"
            for name, machine in machines.items()
            if machine.memory_free < share[name]
        }
        least = byte_count(min(machine.memory_free for machine in machines.values()))
        good = f"at least {least} free; a checkpoint's copy takes {byte_count(max(share.values()))} a node"
        add("memory", short, Level.FAILURE, "free memory, or set checkpoint.asynchronous=false", good)
    else:
        least = byte_count(min(machine.memory_free for machine in machines.values()))
        add("memory", {}, Level.OK, "", f"at least {least} free")
    small = {
        name: f"{byte_count(machine.shm_free)} free in /dev/shm"
        for name, machine in machines.items()
        if machine.shm_free < _SHM and ranks[name] > 1
    }
    least = byte_count(min(machine.shm_free for machine in machines.values()))
    add("/dev/shm", small, Level.WARNING, "mount it larger (docker: --shm-size=16g)", f"at least {least} free")
    wanted, served = _FILES_A_RANK * world + _FILES_BESIDE, _SERVED_A_RANK * world + _SERVED_BESIDE
    few = {
        name: f"{machine.open_files} open files are allowed; {world} ranks may need {wanted}"
        for name, machine in machines.items()
        if 0 <= machine.open_files < wanted
    }
    limit = min(machine.open_files for machine in machines.values())
    level = Level.FAILURE if 0 <= machines[nodes[0].name].open_files < served else Level.WARNING
    add("open files", few, level, f"ulimit -n {max(65536, wanted)}", f"{limit} are allowed")
    if on_gpus and any(machine.infiniband for machine in machines.values()):
        tied = {
            name: f"locked memory is limited to {byte_count(machine.locked)}"
            for name, machine in machines.items()
            if machine.infiniband and 0 <= machine.locked < 1 << 30
        }
        add("locked memory", tied, Level.WARNING, "InfiniBand needs ulimit -l unlimited", "not limited")
    return found


def _alike(name: str, values: Mapping[str, int]) -> Finding:
    if odd_nodes(values):
        return Finding("machines", name, Level.WARNING, told_apart(values), "give every node as many")
    return Finding("machines", name, Level.OK, str(next(iter(values.values()))))
