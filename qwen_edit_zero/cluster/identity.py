"""Who this process is among the ranks of a job, whatever started it.

In order: the variables RANK, WORLD_SIZE ... that torchrun, DeepSpeed and hand-written scripts set; those of MPI; those
of Slurm's srun; else a single process. The first that is there wins, since it was started by the next one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace

from qwen_edit_zero.cluster.interfaces import is_loopback
from qwen_edit_zero.cluster.slurm import expand_nodelist, expand_tasks_per_node
from qwen_edit_zero.errors import ClusterError

_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Identity:
    """One process of a job.

    Attributes:
        rank: 0 <= rank < world_size.
        local_rank: number on this node, 0 <= local_rank < local_world_size.
        launcher: torchrun, deepspeed, environment, openmpi, pmi, mvapich, slurm or single.
        master_addr, master_port: where rank 0 is met; the port is 0 for a single process.
        note: what else was found and not used, for the log; empty if nothing.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    launcher: str
    master_addr: str
    master_port: int
    note: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank} of {self.world_size}, started by {self.launcher}"


def discover(environ: Mapping[str, str] | None = None, *, local_rank_argument: int | None = None) -> Identity:
    """Return who this process is. `local_rank_argument` is the `--local_rank` that some launchers pass.

    Raises ClusterError if variables are missing, are no numbers, or contradict each other.
    """
    env = os.environ if environ is None else environ
    if "RANK" in env or "WORLD_SIZE" in env:
        identity = _from_environment(env, local_rank_argument)
        mpi = _from_mpi(env)
        here = (identity.rank, identity.world_size)
        if mpi is not None and identity.launcher == "environment" and (mpi.rank, mpi.world_size) != here:
            raise ClusterError(
                f"RANK and WORLD_SIZE say rank {identity.rank} of {identity.world_size}, but {mpi.launcher} says "
                f"rank {mpi.rank} of {mpi.world_size}; unset RANK and WORLD_SIZE, or start without mpirun"
            )
    elif (found := _from_mpi(env)) is not None:
        identity = found
        if "SLURM_PROCID" in env and env["SLURM_PROCID"] != str(found.rank):
            note = f"Slurm says task {env['SLURM_PROCID']} of {env.get('SLURM_NTASKS', '?')}; MPI's numbers are used"
            identity = replace(identity, note=note)
    elif "SLURM_PROCID" in env or int_or_none(env.get("SLURM_NTASKS")) not in (None, 1):
        identity = _from_slurm(env)
    else:
        identity = Identity(0, 0, 1, 1, "single", _LOOPBACK, 0)
    if local_rank_argument is not None and identity.world_size > 1 and local_rank_argument != identity.local_rank:
        raise ClusterError(
            f"--local_rank says {local_rank_argument}, but {identity.launcher} says local rank {identity.local_rank}"
        )
    return _checked(identity)


def guess_ranks(environ: Mapping[str, str] | None = None) -> tuple[int | None, int | None]:
    """Rank and local rank as far as the environment says, without checks: for messages before `discover` succeeded."""
    env = os.environ if environ is None else environ
    ranks = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID")
    locals_ = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK")
    rank = next((n for name in ranks if (n := int_or_none(env.get(name))) is not None), None)
    local = next((n for name in (*locals_, "SLURM_LOCALID") if (n := int_or_none(env.get(name))) is not None), None)
    return rank, local


def int_or_none(text: str | None) -> int | None:
    """The non-negative number that `text` is, or None."""
    return int(text) if text is not None and text.isascii() and text.isdigit() else None


def _number(env: Mapping[str, str], name: str) -> int:
    if name not in env:
        raise ClusterError(f"{name} is not set, although other variables of its launcher are")
    value = int_or_none(env[name])
    if value is None:
        raise ClusterError(f"{name} is {env[name]!r}; it must be a whole number")
    return value


def _check_rank(rank: int, world_size: int, launcher: str) -> None:
    if rank >= world_size:
        raise ClusterError(
            f"{launcher} says rank {rank} with world size {world_size}; "
            "ranks count from 0, so the rank must be less than the world size"
        )


def _checked(identity: Identity) -> Identity:
    if identity.world_size < 1:
        raise ClusterError(f"{identity.launcher} says the world size is {identity.world_size}; it must be at least 1")
    _check_rank(identity.rank, identity.world_size, identity.launcher)
    if not identity.local_rank < identity.local_world_size <= identity.world_size:
        raise ClusterError(
            f"{identity.launcher} says local rank {identity.local_rank} of {identity.local_world_size} on this node, "
            f"with world size {identity.world_size}; these contradict each other"
        )
    return identity


def _from_environment(env: Mapping[str, str], local_rank_argument: int | None) -> Identity:
    rank, world_size = _number(env, "RANK"), _number(env, "WORLD_SIZE")
    if "TORCHELASTIC_RUN_ID" in env:
        launcher = "torchrun"
    elif "CROSS_SIZE" in env and "LOCAL_SIZE" in env:
        launcher = "deepspeed"
    else:
        launcher = "environment"
    _check_rank(rank, world_size, launcher)
    if world_size == 1:
        address = env.get("MASTER_ADDR", _LOOPBACK)
        return Identity(rank, 0, 1, 1, launcher, address, int_or_none(env.get("MASTER_PORT")) or 0)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not env.get(name):
            raise ClusterError(f"WORLD_SIZE is {world_size}, but {name} is not set, so the ranks cannot meet")
    address = env["MASTER_ADDR"]
    if "LOCAL_RANK" in env or local_rank_argument is None:
        local_rank = _number(env, "LOCAL_RANK")
    else:
        local_rank = local_rank_argument
    size_name = next((name for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in env), None)
    if size_name is not None:
        local_world_size = _number(env, size_name)
    elif is_loopback(address):
        local_world_size = world_size
    else:
        raise ClusterError("LOCAL_WORLD_SIZE is not set; it must say how many ranks run on this node")
    return Identity(rank, local_rank, world_size, local_world_size, launcher, address, _port(env))


def _port(env: Mapping[str, str]) -> int:
    port = _number(env, "MASTER_PORT")
    if not 0 < port < 65536:
        raise ClusterError(f"MASTER_PORT is {port}; it must be between 1 and 65535")
    return port


def _from_mpi(env: Mapping[str, str]) -> Identity | None:
    """What MPI says; None without MPI. The address may be left empty: `cluster.mpi.agree` fills it in."""
    for launcher, prefix, local_prefix in (
        ("openmpi", "OMPI_COMM_WORLD_", "OMPI_COMM_WORLD_LOCAL_"),
        ("mvapich", "MV2_COMM_WORLD_", "MV2_COMM_WORLD_LOCAL_"),
    ):
        if f"{prefix}RANK" in env:
            rank, world_size = _number(env, f"{prefix}RANK"), _number(env, f"{prefix}SIZE")
            local_rank = _number(env, f"{local_prefix}RANK")
            size_name = f"{local_prefix}SIZE"
            local_world_size = _number(env, size_name) if size_name in env else world_size
            return _with_meeting_point(env, Identity(rank, local_rank, world_size, local_world_size, launcher, "", 0))
    if "PMI_RANK" in env and "MPI_LOCALRANKID" in env:
        rank, world_size = _number(env, "PMI_RANK"), _number(env, "PMI_SIZE")
        local_rank, local_world_size = _number(env, "MPI_LOCALRANKID"), _number(env, "MPI_LOCALNRANKS")
        return _with_meeting_point(env, Identity(rank, local_rank, world_size, local_world_size, "pmi", "", 0))
    return None


def _with_meeting_point(env: Mapping[str, str], identity: Identity) -> Identity:
    if env.get("MASTER_ADDR") and env.get("MASTER_PORT"):
        return replace(identity, master_addr=env["MASTER_ADDR"], master_port=_port(env))
    if identity.local_world_size == identity.world_size:
        job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid") or str(os.getppid())
        return replace(identity, master_addr=_LOOPBACK, master_port=_port_for(job))
    return identity


def _port_for(job: str) -> int:
    """A port below the ephemeral ones, the same for all ranks of a job and seldom that of another job."""
    return 15000 + int.from_bytes(hashlib.sha256(job.encode()).digest()[:4], "big") % 15000


def _from_slurm(env: Mapping[str, str]) -> Identity:
    tasks_name = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    if "SLURM_PROCID" not in env:
        raise ClusterError(
            f"this is a Slurm job of {env[tasks_name]} tasks, but SLURM_PROCID is not set: the script was started "
            "without srun; write srun in front of the command (or use deepspeed or torchrun)"
        )
    rank, world_size = _number(env, "SLURM_PROCID"), _number(env, tasks_name) if tasks_name in env else 1
    per_node = int_or_none(env.get("SLURM_NTASKS_PER_NODE"))
    if per_node is not None and per_node > world_size:
        raise ClusterError(
            f"Slurm says {world_size} task{'s' if world_size > 1 else ''} in all but {per_node} a node "
            "(SLURM_NTASKS and SLURM_NTASKS_PER_NODE); ask for --ntasks = nodes x --ntasks-per-node"
        )
    if world_size > 1 and rank == 0 and not {"SLURM_STEP_ID", "SLURM_STEPID"} & env.keys():
        raise ClusterError(
            f"this is the batch script of a Slurm job of {world_size} tasks, not one of the tasks: "
            "write srun in front of the command (or use deepspeed or torchrun)"
        )
    if world_size == 1:
        return Identity(rank, 0, 1, 1, "slurm", _LOOPBACK, 0)
    nodes = int_or_none(env.get("SLURM_STEP_NUM_NODES") or env.get("SLURM_NNODES"))
    local_rank = _number(env, "SLURM_LOCALID")
    counts = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    if counts:
        node, all_counts = _number(env, "SLURM_NODEID") if "SLURM_NODEID" in env else 0, expand_tasks_per_node(counts)
        if node >= len(all_counts):
            raise ClusterError(
                f"SLURM_NODEID is {node}, but SLURM_TASKS_PER_NODE {counts!r} is {len(all_counts)} nodes"
            )
        local_world_size = all_counts[node]
    elif per_node is not None:
        local_world_size = per_node
    elif nodes in (None, 1):
        local_world_size = world_size
    else:
        raise ClusterError("SLURM_TASKS_PER_NODE is not set; it must say how many ranks run on each node")
    if env.get("MASTER_ADDR"):
        address = env["MASTER_ADDR"]
    elif local_world_size == world_size:
        address = _LOOPBACK
    else:
        listed = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST")
        if not listed:
            raise ClusterError("SLURM_JOB_NODELIST is not set, so rank 0 cannot be found; set MASTER_ADDR to its host")
        address = expand_nodelist(listed)[0]  # Slurm sorts the list, and its first node has task 0
    job = f"{env.get('SLURM_JOB_ID', '')}.{env.get('SLURM_STEP_ID', '')}.{env.get('SLURM_RESTART_COUNT', '')}"
    port = _port(env) if env.get("MASTER_PORT") else _port_for(job)
    return Identity(rank, local_rank, world_size, local_world_size, "slurm", address, port)
