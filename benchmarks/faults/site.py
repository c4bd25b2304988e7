"""Three nodes with warm agents and a login node from which jobs are started with pdsh over ssh."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.cluster.lab.nodes import Nodes

ROOT = Path(__file__).resolve().parents[2]
NODES = ("node1", "node2", "node3")
LOGIN = "login"
# As qwen_edit_zero has the deepspeed command do it: a node that does not answer is given up
SSH = "-o ServerAliveInterval=10 -o ServerAliveCountMax=3"


def until(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait for a condition; False if it is not met in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@dataclass
class Job:
    """One start of the training."""

    number: int
    hosts: Sequence[str]  # of each rank
    log: Path
    launcher: subprocess.Popen[bytes]
    began: float = field(default_factory=time.monotonic)

    def text(self) -> str:
        """Everything it printed."""
        return self.log.read_text(encoding="utf-8", errors="replace")


class Site:
    """The nodes, what runs on them, and which of them can be used; a context manager."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes = Nodes(folder / "lab", [*NODES, LOGIN])
        self.away: set[str] = set()  # nodes that are cut off, paused or down
        self._nursery: subprocess.Popen[str] | None = None
        self._jobs = 0

    def __enter__(self) -> Site:
        command = [sys.executable, "-m", "benchmarks.faults.agent", str(self.folder)]
        with (self.folder / "agents.log").open("wb") as log:
            self._nursery = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=log, stderr=log, text=True, start_new_session=True
            )
        self.nodes.__enter__()
        for name in NODES:
            self.start_agent(name)
        assert until(lambda: len(self.usable()) == 3, 300), (self.folder / "agents.log").read_text()
        return self

    def __exit__(self, *_: object) -> None:
        self.nodes.__exit__()
        if self._nursery is not None:
            self._nursery.kill()
            self._nursery.wait()

    def start_agent(self, name: str) -> None:
        """Have a process on a node that forks ranks."""
        (self.folder / f"{name}.sock").unlink(missing_ok=True)
        assert self._nursery is not None
        assert self._nursery.stdin is not None
        self._nursery.stdin.write(f"{name} {self.nodes.first_process(name)}\n")
        self._nursery.stdin.flush()

    def usable(self) -> list[str]:
        """Nodes on which ranks can be started now."""
        return [name for name in NODES if name not in self.away and self._is_warm(name)]

    def start(self, arguments: Sequence[str]) -> Job:
        """Start three ranks: one on each node, two on one where a node is away."""
        self._jobs += 1
        assert until(lambda: len(self.usable()) >= 2, 300), "no two nodes are there"
        turn = self._jobs % 3
        names = sorted(self.usable(), key=lambda name: (NODES.index(name) - turn) % 3)
        hosts = sorted((names[i % len(names)] for i in range(3)), key=names.index)
        environment = {
            "WORLD_SIZE": "3", "MASTER_ADDR": self.nodes.address(hosts[0]), "MASTER_PORT": str(29500 + self._jobs),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        told = {"job": self._jobs, "hosts": hosts, "environment": environment, "arguments": list(arguments)}
        (self.folder / f"job-{self._jobs}.json").write_text(json.dumps(told), encoding="utf-8")
        remote = f"cd {ROOT} && {sys.executable} -S -E benchmarks/faults/enter.py {self.folder} {self._jobs}"
        pdsh = ["pdsh", "-S", "-R", "ssh", "-w", ",".join(dict.fromkeys(hosts)), remote]
        log = self.folder / f"job-{self._jobs}.log"
        return Job(self._jobs, hosts, log, self._popen(self.nodes.command(LOGIN, pdsh, cwd=ROOT), log))

    def ranks(self, job: Job) -> dict[int, int]:
        """Process ids, as seen from here, of the ranks of a job that are there."""
        found = {}
        for name in set(job.hosts):
            for pid, line in self.nodes.everything(name).items():
                with contextlib.suppress(OSError):
                    comm = Path(f"/proc/{pid}/comm").read_text()
                    if line and (match := re.fullmatch(rf"job{job.number}r(\d+)\n", comm)):
                        found[int(match[1])] = pid
        return found

    def left(self, job: Job, *, but: Sequence[str] = ()) -> int:
        """How many ranks of a job there are, except on some nodes."""
        return sum(job.hosts[rank] not in but for rank in self.ranks(job))

    def signal(self, pid: int, number: int) -> None:
        """Send a signal to a process that may have ended."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    def launcher_pids(self, *programs: str) -> list[int]:
        """The processes of pdsh itself, or of these programs, on the login node."""
        wanted = [[program] for program in programs or ("pdsh",)]
        return [pid for pid, line in self.nodes.everything(LOGIN).items() if line.split()[:1] in wanted]

    def end(self, job: Job) -> None:
        """Make an end of a launcher that waits for what does not come, and of ranks that stayed."""
        for pid in self.ranks(job).values():
            self.signal(pid, signal.SIGKILL)
        for pid in self.launcher_pids():
            self.signal(pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.launcher.wait(2)
            return
        for pid in [
            pid for pid, line in self.nodes.everything(LOGIN).items() if line.split()[:1] in (["pdsh"], ["ssh"])
        ]:
            self.signal(pid, signal.SIGKILL)
        job.launcher.wait(10)

    def come_back(self, name: str) -> None:
        """Start a crashed node and its agent again."""
        self.nodes.revive(name)
        self.start_agent(name)
        self.away.discard(name)

    def _is_warm(self, name: str) -> bool:
        return (self.folder / f"{name}.sock").exists()

    def _popen(self, command: list[str], log: Path) -> subprocess.Popen[bytes]:
        environment = {
            "PATH": os.environ["PATH"], "HOME": "/root", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1",
            "PDSH_SSH_ARGS_APPEND": SSH,
        }  # fmt: skip
        with log.open("ab") as file:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
            )
