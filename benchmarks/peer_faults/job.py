"""One start of a job on the nodes, watched from outside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.peer_faults import processes
from benchmarks.peer_faults.tools import JOB_FILE, NODES, ROOT, Tool
from tests.cluster.lab.nodes import Nodes

_PORTS = iter(range(29600, 32000))
_REPORT = re.compile(r"""distributed[/.]elastic|bin/(torchrun|accelerate)", line|\[launch.py:\d+:sigkill_handler""")
START_SECONDS = 180.0  # for anything before the fault


class Start:
    """Launchers of a job, their output in files; ended, with all their processes, by `close`."""

    def __init__(
        self, tool: Tool, nodes: Nodes, folder: Path, label: str, *, ranks: int = 2, restarts: int = 0,
        on_node2: dict[str, Any] | None = None, nan_step: int | None = None, steps: int | None = None,
    ) -> None:  # fmt: skip
        self.tool, self.nodes, self.folder = tool, nodes, folder
        folder.mkdir(parents=True, exist_ok=True)
        changed = {} if nan_step is None or tool.name.startswith("ours") else {"nan_step": nan_step}
        changed |= {} if steps is None else {"steps": steps}
        for name in NODES:
            special = on_node2 or {} if name == NODES[1] else {}
            _put(nodes, name, tool.settings(folder, **changed, **special))
        tool.forget_end(folder)
        commands = tool.commands(
            nodes, folder, ranks=ranks, port=next(_PORTS), restarts=restarts, nan=nan_step is not None
        )
        environment = _environment(folder, tool, nan_step)
        self.outputs = [folder / f"{label}-{name}.log" for name in commands]
        self.launchers: list[subprocess.Popen[bytes]] = []
        self.launcher_seconds: float | None = None  # see wait_until_gone; until the first node's launcher had ended
        for (name, command), output in zip(commands.items(), self.outputs, strict=True):
            with output.open("wb") as file:
                self.launchers.append(
                    subprocess.Popen(
                        nodes.command(name, command, cwd=ROOT), env=environment, stdin=subprocess.DEVNULL, stdout=file,
                        stderr=subprocess.STDOUT, start_new_session=True,
                    )
                )  # fmt: skip

    @property
    def tail(self) -> str:
        """The end of what each launcher printed."""
        return "\n".join(output.read_text(errors="replace")[-3000:] for output in self.outputs)

    @property
    def last_line(self) -> str:
        """The last line with words in it that the first node's launcher printed."""
        return _last(self.outputs[0].read_text(errors="replace").splitlines())

    @property
    def rank_line(self) -> str:
        """The last such line before the launcher's own report of what went wrong."""
        lines = self.outputs[0].read_text(errors="replace").splitlines()
        begins = next((i for i, line in enumerate(lines) if _REPORT.search(line)), len(lines))
        return _last([line for line in lines[:begins] if not line.startswith("Traceback (most recent call last)")])

    @property
    def status(self) -> int | None:
        """Of the first node's launcher."""
        return self.launchers[0].poll()

    def real_launchers(self) -> list[int]:
        """Ids of the launchers themselves, not of what put them into the nodes' namespaces."""
        entered = [launcher.pid for launcher in self.launchers]
        return [process.pid for process in processes.of_job(self.folder) if process.parent in entered]

    def wait_for(self, condition: Callable[[], bool], what: str, seconds: float = START_SECONDS) -> None:
        """Raises RuntimeError with the output if it does not come true."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline or self._gone():
                text = f"{self.tail}\nstatuses: {[launcher.poll() for launcher in self.launchers]}"
                raise RuntimeError(f"{self.tool.name}: {what} did not come\n{text}")
            time.sleep(0.02)

    def wait_for_step(self, step: int) -> None:
        """Until this step, of this start or an earlier one, is logged."""
        self.wait_for(lambda: any(t.step >= step for t in self.tool.trained(self.folder)), f"step {step}")

    def wait_until_gone(self, seconds: float) -> float | None:
        """Seconds until no process is left; None if some are after so many."""
        began = time.monotonic()
        self.launcher_seconds = None
        while time.monotonic() < began + seconds:
            if self.launcher_seconds is None and self.status is not None:
                self.launcher_seconds = time.monotonic() - began
            if self._gone():
                return time.monotonic() - began
            time.sleep(0.1)
        return None

    def _gone(self) -> bool:
        """A launcher is seen by its command line but for the moments when it begins and ends."""
        return all(launcher.poll() is not None for launcher in self.launchers) and not processes.of_job(self.folder)

    def close(self) -> None:
        """End what is left."""
        processes.send(signal.SIGCONT, [process.pid for process in processes.of_job(self.folder)])
        processes.sweep(self.folder)
        for launcher in self.launchers:
            launcher.wait()


def _last(lines: list[str]) -> str:
    return next((line.strip() for line in reversed(lines) if re.search("[A-Za-z]{3}", line)), "")


def _put(nodes: Nodes, name: str, content: str) -> None:
    command = nodes.command(name, ["sh", "-c", f"cat > {JOB_FILE}"], cwd=ROOT)
    subprocess.run(command, input=content, text=True, check=True)


def _environment(folder: Path, tool: Tool, nan_step: int | None) -> dict[str, str]:
    plain = {
        "PATH": os.environ["PATH"], "HOME": "/root", "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "eth0", "PYTHONDONTWRITEBYTECODE": "1", "HF_HUB_OFFLINE": "1",
        **tool.environment,
    }  # fmt: skip
    if paths := [plain.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]:
        plain["PYTHONPATH"] = ":".join(path for path in paths if path)
    if nan_step is not None:
        plain["NAN_STEP"] = str(nan_step)
    forwarded = folder / "deepspeed.env"  # DeepSpeed carries no more than this to other nodes
    forwarded.write_text("".join(f"{key}={value}\n" for key, value in plain.items() if key != "HOME"), encoding="utf-8")
    return plain | {"DS_ENV_FILE": str(forwarded)}
