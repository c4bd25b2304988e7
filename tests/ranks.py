"""Run a function on several ranks: gloo processes forked from a server that has the heavy imports already, or GPUs.

Importing torch, deepspeed and diffusers costs about ten seconds; the fork server pays it once for the whole session
and never computes anything itself, so its children are as good as fresh processes. Ranks on GPUs are started afresh:
CUDA does not survive forking.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

_PRELOAD = ["torch", "torch.distributed.fsdp", "deepspeed", "diffusers", "transformers", "peft"]
_context = None


def free_port() -> int:
    """A TCP port on the loopback interface that was free a moment ago."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _get_context() -> Any:
    global _context
    if _context is None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
        _context = multiprocessing.get_context("forkserver")
        _context.set_forkserver_preload(_PRELOAD)
    return _context


def _entry(
    connection: Connection,
    fn: Callable[..., Any],
    rank: int,
    world: int,
    port: int,
    init: bool,
    device: str,
    args: tuple[Any, ...],
) -> None:
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1", DS_ACCELERATOR=device,
    )  # fmt: skip
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        if init:
            dist.init_process_group("nccl" if device == "cuda" else "gloo", rank=rank, world_size=world)
        connection.send(("ok", fn(rank, world, *args)))
    except BaseException:
        connection.send(("error", traceback.format_exc()))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        connection.close()


def run_ranks(
    fn: Callable[..., Any],
    world: int,
    *args: Any,
    timeout: float = 240.0,
    init_process_group: bool = True,
    device: str = "cpu",
) -> list[Any]:
    """Return `[fn(rank, world, *args) for each rank]`, computed by `world` gloo processes, or on as many GPUs.

    `fn` and `args` must be picklable (a module-level function). If a rank raises, the others are ended and
    AssertionError shows its traceback; the same if `timeout` seconds pass.
    """
    context = _get_context() if device == "cpu" else multiprocessing.get_context("spawn")
    port = free_port()
    processes, connections = [], []
    for rank in range(world):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_entry, args=(sender, fn, rank, world, port, init_process_group, device, args))
        process.start()
        sender.close()
        processes.append(process)
        connections.append(receiver)
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout
    try:
        while len(results) < world:
            pending = {c: r for r, c in enumerate(connections) if r not in results}
            ready = wait(list(pending), timeout=max(0.0, deadline - time.monotonic()))
            assert ready, f"ranks {sorted(pending.values())} gave no result within {timeout:.0f} s"
            for connection in ready:
                rank = pending[connection]  # type: ignore[index]
                try:
                    status, value = connection.recv()  # type: ignore[union-attr]
                except EOFError:
                    processes[rank].join(5)
                    raise AssertionError(f"rank {rank} died with exit code {processes[rank].exitcode}") from None
                assert status == "ok", f"rank {rank} failed:\n{value}"
                results[rank] = value
    finally:
        for process in processes:
            process.join(0 if len(results) < world else 10)
            if process.is_alive():
                process.kill()
    return [results[rank] for rank in range(world)]
