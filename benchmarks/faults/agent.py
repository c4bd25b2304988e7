"""On each node: a process that has imported everything and forks ranks, each of which runs the real entry point.

    python -m benchmarks.faults.agent FOLDER

imports everything once. For each line `NODE PID` of its standard input it forks an agent that enters the namespaces of
process PID, the first on that node. The agent listens on FOLDER/NODE.sock (see `enter.py`) and does what a launcher's
process on a node does: starts ranks, waits for them, tells their statuses. It ends none of them: how a job ends
without help is what is measured.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import socket
import sys
import traceback
from dataclasses import dataclass, field
from typing import Any

PRELOAD = ["torch", "torch.distributed.fsdp", "diffusers", "transformers", "peft", "qwen_edit_zero.training.run"]
BUG, BAD_READ = signal.SIGRTMIN + 5, signal.SIGRTMIN + 6
ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_NAME = 15  # prctl's PR_SET_NAME


@dataclass
class _Started:
    """Ranks of one start on this node, and who waits for them."""

    asked_by: socket.socket
    ranks: set[int] = field(default_factory=set)
    statuses: list[int] = field(default_factory=list)


def nursery(folder: str) -> None:
    """Import everything, and fork an agent for each node that is named, until there is no more input."""
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # as the entry point sets it, before it imports torch
    for module in PRELOAD:
        importlib.import_module(module)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # agents end with their nodes
    for line in sys.stdin:
        node, pid = line.split()
        if os.fork() == 0:
            _enter(int(pid))
            if os.fork() == 0:  # now in the node's process namespace
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                serve(node, folder)
            os._exit(0)


def _enter(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    namespaces = [os.open(f"/proc/{pid}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "pid", "mnt")]
    for namespace in namespaces:
        if libc.setns(namespace, 0):
            raise OSError(ctypes.get_errno(), "setns")


def serve(node: str, folder: str) -> None:
    """Fork ranks for whoever asks, for ever."""
    os.close(0)
    os.open(os.devnull, os.O_RDONLY)
    os.chdir(ROOT)
    path = os.path.join(folder, f"{node}.sock")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(16)
    started: list[_Started] = []
    while True:
        if select.select([listener], [], [], 0.05)[0]:
            connection, _ = listener.accept()
            message, descriptors, _, _ = socket.recv_fds(connection, 1 << 20, 2)
            request, new = json.loads(message), _Started(connection)
            for rank in request["ranks"]:
                new.ranks.add(_fork(rank, request, descriptors, listener))
            for descriptor in descriptors:
                os.close(descriptor)
            started.append(new)
        _reap(started)


def _fork(rank: int, request: dict[str, Any], descriptors: list[int], listener: socket.socket) -> int:
    if pid := os.fork():
        return pid
    status = 1
    try:
        listener.close()
        os.dup2(descriptors[0], 1)
        os.dup2(descriptors[1], 2)
        ctypes.CDLL(None).prctl(_NAME, f"job{request['job']}r{rank}".encode(), 0, 0, 0)
        local = request["ranks"].index(rank)
        os.environ.update(request["environment"], RANK=str(rank), LOCAL_RANK=str(local))
        os.environ["LOCAL_WORLD_SIZE"] = str(len(request["ranks"]))
        _arm()
        import torch

        from qwen_edit_zero.train import main

        torch.set_num_threads(1)
        status = main(request["arguments"])
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(status)


def _reap(started: list[_Started]) -> None:
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            code = os.waitstatus_to_exitcode(ended[1])
            for one in started:
                if ended[0] in one.ranks:
                    one.ranks.discard(ended[0])
                    one.statuses.append(128 - code if code < 0 else code)
    for one in [one for one in started if not one.ranks]:
        with contextlib.suppress(OSError):
            one.asked_by.sendall(json.dumps(one.statuses).encode())
        one.asked_by.close()
        started.remove(one)


def _arm() -> None:
    """Two faults that only come from inside: on one signal a bug in training, on another a disk that cannot be read."""
    from qwen_edit_zero.edit_data.cache.entries import Entries

    read = Entries.get
    is_bad = False

    def get(self: Entries, key: bytes) -> Any:
        if is_bad:
            raise OSError(5, "Input/output error (injected)", str(self.folder))
        return read(self, key)

    def fail(number: int, frame: object) -> None:
        raise RuntimeError("a bug in the training code (injected)")

    def spoil(number: int, frame: object) -> None:
        nonlocal is_bad
        is_bad = True

    Entries.get = get  # type: ignore[method-assign]
    signal.signal(BUG, fail)
    signal.signal(BAD_READ, spoil)


if __name__ == "__main__":
    nursery(sys.argv[1])
