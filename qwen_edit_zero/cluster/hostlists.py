"""Lists of hosts in the forms of other launchers, from and to what `parse_hostfile` reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from qwen_edit_zero.cluster.hostfile import MAX_SLOTS, Host, parse_hostfile, parse_line, read_hostfile
from qwen_edit_zero.cluster.slurm import compress_nodelist, expand_nodelist
from qwen_edit_zero.errors import ClusterError

READ = ("deepspeed", "openmpi", "mpich", "slurm")
WRITTEN = (*READ, "torchrun")
TORCHRUN_PORT = 29500


def read_hosts(path: Path, form: str, *, slots: int | None = None) -> list[Host]:
    """Return the hosts of a file in one of the forms `READ`; `slots`, of each host, is for Slurm's, which has none.

    `mpich` is a line `HOST:N` a host, `slurm` a node list such as `n[001-004,7]`. Raises ClusterError naming file and
    line if it is not well formed or names a host twice.
    """
    if form == "slurm":
        if slots is None:
            raise ClusterError("a node list of Slurm does not say how many ranks run on a node; add --slots N")
        if not 0 < slots <= MAX_SLOTS:
            raise ClusterError(f"--slots is {slots}; it must be from 1 to {MAX_SLOTS}")
        names = [name for line in read_hostfile(path).split() for name in expand_nodelist(line)]
        return _unlike([Host(name, slots, 1) for name in names], path)
    if slots is not None:
        raise ClusterError(f"--slots is for --from slurm; a list of {form} says itself how many ranks run on a node")
    if form != "mpich":
        return parse_hostfile(path)
    hosts = []
    for number, line in enumerate(read_hostfile(path).splitlines(), start=1):
        if content := line.split("#", 1)[0].strip():
            shown = f"{path}:{number}: {line.strip()!r}"
            match = re.fullmatch(r"([^\s:]+):([0-9]+)", content)
            if match is None:
                raise ClusterError(f"{shown} is not HOST:N, the form of MPICH, such as node1:8")
            hosts.append(parse_line(f"{match[1]} slots={match[2]}", number, shown))
    return _unlike(hosts, path)


def _unlike(hosts: list[Host], path: Path) -> list[Host]:
    if not hosts:
        raise ClusterError(f"{path} names no hosts")
    first: dict[str, int] = {}
    for host in hosts:
        if host.name in first:
            raise ClusterError(
                f"{path}:{host.line}: {host.name} is named a second time (first in line {first[host.name]})"
            )
        first[host.name] = host.line
    return hosts


def written(hosts: Sequence[Host], form: str) -> str:
    """Return `hosts` in one of the forms `WRITTEN`, with a last line end.

    `slurm` is options of sbatch and srun; `torchrun` is a line `HOST: OPTIONS` for the torchrun of each host. Raises
    ClusterError where a form cannot say it.
    """
    if form == "torchrun":
        rendezvous = f"--master_addr {hosts[0].name} --master_port {TORCHRUN_PORT}"
        lines = [
            f"{host.name}: --nnodes {len(hosts)} --node_rank {i} --nproc_per_node {host.slots} {rendezvous}"
            for i, host in enumerate(hosts)
        ]
    elif form == "slurm":
        lines = [_slurm_options(hosts)]
    elif form == "mpich":
        if addressed := next((host for host in hosts if ":" in host.name), None):
            raise ClusterError(f"{addressed.name} is an IPv6 address, which cannot stand before MPICH's colon; name it")
        lines = [f"{host.name}:{host.slots}" for host in hosts]
    else:
        # mpirun takes no user in a hostfile
        user = {host.name: f"{host.user}@" if host.user and form == "deepspeed" else "" for host in hosts}
        lines = [f"{user[host.name]}{host.name} slots={host.slots}" for host in hosts]
    return "".join(f"{line}\n" for line in lines)


def _slurm_options(hosts: Sequence[Host]) -> str:
    slots = hosts[0].slots
    if odd := next((host for host in hosts if host.slots != slots), None):
        raise ClusterError(
            f"{hosts[0].name} has {slots} slots and {odd.name} {odd.slots}; Slurm's --ntasks-per-node is one number "
            "for all nodes: make the slots equal, or submit one job a kind of node"
        )
    listed = compress_nodelist([host.name for host in hosts])
    return f"--nodes={len(hosts)} --nodelist={listed} --ntasks-per-node={slots} --gpus-per-node={slots}"
