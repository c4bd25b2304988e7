"""Let the ranks meet: choose device and backend once, and start torch's process group."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore

from qwen_edit_zero.cluster import early_word, failure
from qwen_edit_zero.cluster.identity import Identity
from qwen_edit_zero.cluster.interfaces import (
    interface_towards,
    is_loopback,
    is_served_here,
    name_resolves_to_loopback,
    outward_interface,
)
from qwen_edit_zero.cluster.mpi import agree
from qwen_edit_zero.errors import ClusterError

MEETING_SECONDS = 300  # ranks of a job start within minutes of each other, or not at all


def start(
    identity: Identity,
    *,
    timeout_seconds: int,
    device: str = "auto",
    meeting_seconds: int = MEETING_SECONDS,
    met: Callable[[Store], None] | None = None,
) -> torch.device:
    """Start the process group and return this rank's device.

    `device` is engine.device: "auto" takes the GPUs where there are any, "cuda" demands them. The backend is NCCL on
    GPUs and gloo on CPUs. A collective that takes longer than `timeout_seconds` raises. Rank 0 is looked for
    `meeting_seconds`; `met` is called with the job's store (if there are several ranks) before collectives are set up.
    Raises ClusterError if there is no usable GPU for this rank, or if the ranks do not meet.
    """
    chosen = choose_device(identity, device)
    identity = agree(identity)
    _check_meeting_point(identity)
    _tell_libraries(identity)
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
        os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")  # NCCL's flight recorder: the last collectives, for hangs
    else:
        _share_cores(identity)
    _choose_gloo_interface(identity)  # beside NCCL too: checkpoints written in the background are agreed on over gloo
    backend = "nccl" if chosen.type == "cuda" else "gloo"
    options: dict[str, Any] = {"device_id": chosen} if chosen.type == "cuda" else {}
    try:
        _bound_groups_made_later(timeout_seconds)
        store = _meet(identity, min(timeout_seconds, meeting_seconds))
        if identity.world_size > 1:
            watching = connect(identity, serve=False, seconds=MEETING_SECONDS)
            failure.watch(watching, identity.rank, identity.world_size)
            failure.know_first_host(identity.master_addr)
            if met is not None:
                met(store)
        dist.init_process_group(
            backend,
            store=PrefixStore("ranks", store),
            rank=identity.rank,
            world_size=identity.world_size,
            timeout=timedelta(seconds=timeout_seconds),
            **options,
        )
    except (dist.DistError, RuntimeError, OSError) as error:
        raise _did_not_meet(identity, backend, error) from error
    return chosen


def _bound_groups_made_later(seconds: int) -> None:
    """Let this be the time-out of groups for which none is named: DeepSpeed's and device meshes', which would have
    torch's 10 or 30 minutes, whatever the time-out of the first group is."""
    from torch.distributed import distributed_c10d

    for name in ("default_pg_timeout", "default_pg_nccl_timeout"):
        setattr(distributed_c10d, name, timedelta(seconds=seconds))


def stop() -> None:
    """End the process group after all ranks have come here. Does nothing if none was started.

    Nor while an error is on its way, in a `finally`: other ranks may never come, and `run_guarded` ends them all.
    """
    if dist.is_initialized() and sys.exc_info()[1] is None:
        dist.barrier()
        failure.unwatch()
        dist.destroy_process_group()


def choose_device(identity: Identity, wanted: str) -> torch.device:
    """Return the device of this rank. Raises ClusterError if it should be a GPU and there is none for it."""
    if wanted == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count == 0:
        why = _why_no_gpu()
        if wanted == "cuda":
            raise ClusterError(
                f"engine.device is cuda, but {socket.gethostname()} has no GPU that torch can use: {why}; "
                "run on a machine with GPUs, or set engine.device=cpu"
            )
        if _has_nvidia_driver():
            raise ClusterError(
                f"{socket.gethostname()} has an NVIDIA driver, but torch can use no GPU: {why}; "
                "mend that, or set engine.device=cpu to train on the CPU all the same"
            )
        return torch.device("cpu")
    if count == 1 and identity.launcher == "slurm":
        return torch.device("cuda", 0)  # --gpus-per-task=1 shows each task its own GPU as number 0
    if identity.local_rank >= count:
        raise ClusterError(
            f"{socket.gethostname()} runs {identity.local_world_size} ranks, but torch sees {count} GPU"
            f"{'s' if count > 1 else ''} (CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}), "
            f"so local rank {identity.local_rank} has none; start one rank a GPU"
        )
    return torch.device("cuda", identity.local_rank)


def _has_nvidia_driver() -> bool:
    return Path("/proc/driver/nvidia/version").exists()


def _why_no_gpu() -> str:
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and visible.strip() in ("", "-1", "NoDevFiles"):
        return f"CUDA_VISIBLE_DEVICES is {visible!r}, which hides all"
    if not _has_nvidia_driver():
        return "there is no NVIDIA driver"
    return f"CUDA {torch.version.cuda} of this torch finds none; see nvidia-smi"


def _check_meeting_point(identity: Identity) -> None:
    """Say where the ranks meet; raise ClusterError if that is on another machine than rank 0.

    Only under Slurm, which starts each rank itself: elsewhere MASTER_ADDR may be a forwarded address, as in a service
    of Kubernetes.
    """
    if identity.rank or identity.world_size == 1:
        return
    if identity.launcher == "slurm" and not is_served_here(identity.master_addr):
        raise ClusterError(
            f"MASTER_ADDR is {identity.master_addr}, which is not {socket.gethostname()}, where Slurm started rank 0; "
            "it may be left over from another job: unset MASTER_ADDR and MASTER_PORT, and they are found by themselves"
        )
    note = f" ({identity.note})" if identity.note else ""
    place = f"{identity.master_addr}:{identity.master_port}"
    print(f"{identity.world_size} ranks, started by {identity.launcher}, meet at {place}{note}", flush=True)


def _tell_libraries(identity: Identity) -> None:
    """Set the variables from which libraries take ranks: srun and mpirun do not set them."""
    os.environ.update(
        RANK=str(identity.rank),
        WORLD_SIZE=str(identity.world_size),
        LOCAL_RANK=str(identity.local_rank),
        LOCAL_WORLD_SIZE=str(identity.local_world_size),
        MASTER_ADDR=identity.master_addr,
    )
    if identity.master_port:
        os.environ["MASTER_PORT"] = str(identity.master_port)


def _share_cores(identity: Identity) -> None:
    """Split this node's cores evenly between its ranks, unless OMP_NUM_THREADS says otherwise."""
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // identity.local_world_size))


def _choose_gloo_interface(identity: Identity) -> None:
    """Name gloo's interface where it would bind to loopback: on nodes whose own name is unknown or 127.0.1.1."""
    if "GLOO_SOCKET_IFNAME" in os.environ or identity.local_world_size == identity.world_size:
        return
    if not name_resolves_to_loopback():
        return
    # On rank 0's own node the way to rank 0 is loopback, too
    if (name := interface_towards(identity.master_addr) or outward_interface()) is not None:
        os.environ["GLOO_SOCKET_IFNAME"] = name


def _meet(identity: Identity, seconds: int) -> Store:
    """The store through which ranks find each other; rank 0 serves it, unless torchrun's agent does."""
    if identity.world_size == 1:
        return HashStore()
    served_by_agent = _served_by_agent()
    serve = identity.rank == 0 and not served_by_agent
    if serve or served_by_agent or identity.local_world_size == identity.world_size:
        return connect(identity, serve=serve, seconds=seconds)
    place = identity.master_addr, identity.master_port, identity.rank
    with early_word.Listening(*place, failure.end_with_rank_0):
        return connect(identity, serve=False, seconds=seconds)


def connect(identity: Identity, *, serve: bool, seconds: int) -> Store:
    """A connection of its own to the job's store; `serve` makes this process the one that holds it."""
    store = TCPStore(
        identity.master_addr,
        identity.master_port,
        identity.world_size,
        is_master=serve,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,
    )
    if not _served_by_agent():
        return store
    # torchrun's own store outlives the ranks: what those of an earlier attempt wrote does not concern this one. Only
    # there: on a node whose ranks did not fail torchrun does not count the attempt, and the numbers differ.
    return PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)


def _served_by_agent() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _did_not_meet(identity: Identity, backend: str, error: BaseException) -> ClusterError:
    place = f"{identity.master_addr}:{identity.master_port}"
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    if "EADDRINUSE" in str(error) or "address already in use" in str(error).lower():
        hint = "another job uses this port; give this one another (--master_port, or MASTER_PORT)"
    elif backend == "gloo" and not is_loopback(identity.master_addr):
        hint = (
            "check that all ranks were started and that the nodes reach each other; if a node has several interfaces, "
            "set GLOO_SOCKET_IFNAME to the one they share (see `ip addr`), such as eth0"
        )
    elif backend == "nccl":
        hint = (
            "check that all ranks were started and that the nodes reach each other; NCCL_SOCKET_IFNAME names the "
            "interface, and NCCL_DEBUG=INFO says what NCCL tried"
        )
    else:
        hint = "check that all ranks were started"
    return ClusterError(f"{identity} on {socket.gethostname()} could not meet the others at {place}: {reason}; {hint}")
