"""Nodes on one machine: namespaces with a name, an address, processes and an sshd of their own, on one bridge.

All of them live in one box, a network, mount and process namespace of its own, so nothing of them is ever seen outside:
no interface, no name, no port. The box ends with the process that made it, however that ends, and everything in it ends
with the box. Files are those of the machine: every node sees the same ones.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_HERE = Path(__file__).parent
_OURS = ("train.py", "qwen_edit_zero", "deepspeed", "torchrun", "torch.distributed", "mpirun", "orted", "pdsh", "srun")
_SSH_CONFIG = """\
Host *
  IdentityFile {folder}/id
  IdentitiesOnly yes
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
  ConnectTimeout 10
"""
_SSHD_CONFIG = """\
Port 22
HostKey {folder}/hostkey
PidFile /run/sshd.pid
AuthorizedKeysFile {folder}/id.pub
StrictModes no
PermitRootLogin prohibit-password
PasswordAuthentication no
UsePAM no
MaxStartups 100
"""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    status: int
    text: str


class Nodes:
    """Running nodes; a context manager, so that they end. Their files are in `folder`."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self.names = folder, list(names)
        self._pids: dict[str, int] = {}
        folder.mkdir(parents=True, exist_ok=True)
        for key in ("id", "hostkey"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        (folder / "ssh_config").write_text(_SSH_CONFIG.format(folder=folder))
        (folder / "sshd_config").write_text(_SSHD_CONFIG.format(folder=folder))
        hosts = "".join(f"{self.address(name)} {name}\n" for name in names)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        self._log = (folder / "box.log").open("wb")
        box = ["unshare", "--net", "--pid", "--mount", "--uts", "--fork", "--kill-child"]
        self._box = subprocess.Popen(  # --pdeathsig: also if this process is killed
            ["setpriv", "--pdeathsig", "KILL", *box, "bash", _HERE / "box.sh", folder, *names],
            stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True,
        )  # fmt: skip

    def __enter__(self) -> Nodes:
        try:
            self._wait_until_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._box.kill()
        self._box.wait()
        self._log.close()
        deadline = time.monotonic() + 20
        while self._in_box() and time.monotonic() < deadline:  # the kernel ends a namespace in its own time
            time.sleep(0.05)

    def address(self, name: str) -> str:
        """The IPv4 address of a node."""
        return f"10.77.0.{11 + self.names.index(name)}"

    def first_process(self, name: str) -> int:
        """The node's process 1, as seen from here: its namespaces are the node's."""
        return self._pids[name]

    def command(self, name: str, command: Sequence[str | Path], *, cwd: Path) -> list[str]:
        """The command that runs `command` on a node."""
        enter = ["nsenter", "--target", str(self._pids[name]), "--all", f"--wd={cwd}", "--"]
        return [*enter, *map(str, command)]

    def start(
        self, name: str, *command: str | Path, cwd: Path, environment: Mapping[str, str] | None = None
    ) -> subprocess.Popen[str]:
        """Start a command on a node, with only `environment` and a plain PATH; output and errors in one stream."""
        plain = {"PATH": os.environ["PATH"], "HOME": "/root", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(
            self.command(name, command, cwd=cwd), env={**plain, **(environment or {})}, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip

    def run(
        self,
        name: str,
        *command: str | Path,
        cwd: Path,
        environment: Mapping[str, str] | None = None,
        timeout: float = 300.0,
    ) -> Ended:
        """Run a command on a node to its end. Raises AssertionError with its output if that takes too long."""
        return self.end(self.start(name, *command, cwd=cwd, environment=environment), timeout=timeout)

    def end(self, process: subprocess.Popen[str], *, timeout: float = 300.0) -> Ended:
        """Wait for a command that `start` began. Raises AssertionError with its output if that takes too long."""
        process.send_signal(signal.SIGCONT)  # nsenter stops with what it has started: see `pause`
        try:
            text, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.sweep()
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            text, _ = process.communicate(timeout=30)
            raise AssertionError(f"no end within {timeout:.0f} s: {process.args}\n{text}") from None
        return Ended(process.returncode, text)

    def cut(self, name: str) -> None:
        """Pull the node's cable."""
        self._link(name, "down")

    def heal(self, name: str) -> None:
        """Plug the node's cable in again."""
        self._link(name, "up")

    def slow(self, name: str, rate: str) -> None:
        """Let what the bridge sends to the node come at no more than `rate`, such as 2mbit."""
        shape = ["tbf", "rate", rate, "burst", "16kb", "latency", "400ms"]
        self._in_box_run("tc", "qdisc", "replace", "dev", name, "root", *shape)

    def fast(self, name: str) -> None:
        """Undo `slow`."""
        self._in_box_run("tc", "qdisc", "del", "dev", name, "root")

    def crash(self, name: str) -> None:
        """End everything on the node at once; it stays away until `revive`."""
        os.kill(self._pids[name], signal.SIGKILL)

    def revive(self, name: str) -> None:
        """Start a crashed node again, with its address, and wait until it can be reached."""
        (self.folder / f"{name}.ready").unlink()
        del self._pids[name]
        enter = ["nsenter", "--target", str(self._box_pid()), "--all", "--", "bash", str(_HERE / "plug_in.sh")]
        command = [*enter, str(self.folder), name, self.address(name)]
        subprocess.run(command, check=True, stdout=self._log, stderr=self._log, stdin=subprocess.DEVNULL, timeout=60)
        self._wait_until_ready()

    def pause(self, name: str) -> None:
        """Freeze everything on the node, as a virtual machine that is suspended; its link stays."""
        for pid in self.everything(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    def resume(self, name: str) -> None:
        """Undo `pause`."""
        for pid in self.everything(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def hang_up(self, name: str) -> int:
        """Kill the sshd processes that serve sessions on the node, and return how many."""
        found = [pid for pid, line in self.everything(name).items() if line.startswith("sshd: ")]
        found = [pid for pid in found if "[listener]" not in command_lines().get(pid, "[listener]")]
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(found)

    def everything(self, name: str) -> dict[int, str]:
        """Process ids, as seen from here, and command lines of all that runs on a node; nothing if it has crashed."""
        home = _namespace(self._pids[name], "pid")
        if home is None:
            return {}
        return {pid: line for pid, line in command_lines().items() if _namespace(pid, "pid") == home}

    def processes(self, name: str) -> dict[int, str]:
        """Process ids, as seen from here, and command lines of launchers and ranks on a node."""
        return {
            pid: line
            for pid, line in self.everything(name).items()
            if any(word in line for word in _OURS) and "slurmstepd" not in line
        }

    def left(self) -> dict[str, list[str]]:
        """Launchers and ranks that still run anywhere, after a moment's patience."""
        deadline = time.monotonic() + 20
        while True:
            found = {name: list(lines.values()) for name in self.names if (lines := self.processes(name))}
            if not found or time.monotonic() > deadline:
                return found
            time.sleep(0.2)

    def sweep(self) -> None:
        """Kill launchers and ranks on all nodes."""
        for name in self.names:
            for pid in self.processes(name):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _link(self, name: str, state: str) -> None:
        self._in_box_run("ip", "link", "set", name, state)

    def _in_box_run(self, *command: str) -> None:
        enter = ["nsenter", "--target", str(self._box_pid()), "--net", "--mount", "--"]
        subprocess.run([*enter, *command], check=True)

    def _box_pid(self) -> int:
        return next(pid for pid, line in command_lines().items() if self._is_init(pid, line, "box.sh", self.names[0]))

    def _is_init(self, pid: int, line: str, script: str, name: str) -> bool:
        """Whether this is what runs as process 1: `bash SCRIPT FOLDER NAME ...`."""
        return line.split()[:4] == ["bash", str(_HERE / script), str(self.folder), name] and _is_1(pid)

    def _in_box(self) -> list[int]:
        return [pid for pid, line in command_lines().items() if str(_HERE) in line and str(self.folder) in line]

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + 60
        ready = [self.folder / "box.ready", *(self.folder / f"{name}.ready" for name in self.names)]
        while not all(file.exists() for file in ready):
            logs = "".join(file.read_text() for file in sorted(self.folder.glob("*.log")))
            assert self._box.poll() is None, f"the box ended with status {self._box.returncode}: {logs}"
            assert time.monotonic() < deadline, f"nodes not ready: {[f.name for f in ready if not f.exists()]}\n{logs}"
            time.sleep(0.05)
        for pid, line in command_lines().items():
            for name in self.names:
                if self._is_init(pid, line, "node.sh", name):
                    self._pids[name] = pid
        assert self._pids.keys() == set(self.names), f"found only {sorted(self._pids)}"


def command_lines() -> dict[int, str]:
    """The command line of every process, as far as it can be seen from here."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/cmdline", "rb") as file:
                found[int(entry)] = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
    return found


def _namespace(pid: int, kind: str) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/{kind}")
    except OSError:
        return None


def _is_1(pid: int) -> bool:
    """Whether a process is the first of its process namespace."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
        return next((line.split()[-1] == "1" for line in file if line.startswith("NSpid:")), False)
    return False
