"""A tool on its nodes: jobs that are disturbed, resumed, and compared with one that was not."""

from __future__ import annotations

import re
import shutil
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.peer_faults import processes
from benchmarks.peer_faults.job import Start
from benchmarks.peer_faults.tools import SETTINGS, Ours, Tool, Trained, Weights
from tests.cluster.lab.nodes import Nodes

FAULT_STEP = 14  # checkpoints of steps 6 and 12 are there
PATIENCE = 120.0  # seconds a cell may take after its fault
STEPS = int(SETTINGS["steps"])


@dataclass
class Cell:
    """What one tool did on one fault. None: does not apply, or was not seen."""

    seconds: float | None = None  # from the fault until every process was gone; None: some were there after PATIENCE
    left: int = 0  # processes still there then
    left_ranks: int = 0  # ranks among them
    launcher_seconds: float | None = None  # until the launcher on the first node had ended
    status: int | None = None  # of the launcher on the first node
    last_line: str = ""  # of its output
    rank_line: str = ""  # the last line before the launcher's own report
    reached: int | None = None  # the last step done before the end
    resumed: int | None = None  # the step that the next start went on from; 0: from the beginning
    resume_status: int | None = None
    resume_line: str = ""  # the last line of the next start's output, if it failed
    same_samples: bool | None = None  # from there on, as in a run without faults
    same_weights: bool | None = None  # at the end
    finite: bool | None = None  # the weights at the end
    note: str = ""  # what the fault's own look found

    @property
    def lost(self) -> int | None:
        """Steps done in vain."""
        return None if self.resumed is None or self.reached is None else max(0, self.reached - self.resumed)


@dataclass(frozen=True)
class Reference:
    """The run without faults."""

    steps: dict[int, Trained]
    weights: Weights
    checkpoint_bytes: int


class Bench:
    """One tool on its own pair of nodes."""

    def __init__(self, tool: Tool, nodes: Nodes, work: Path, limited: Path) -> None:
        self.tool, self.nodes, self._work, self.limited = tool, nodes, work, limited
        self._reference: Reference | None = None

    def folder(self, name: str, *, limited: bool = False) -> Path:
        """A new, empty folder for a job."""
        path = (self.limited if limited else self._work) / f"{self.tool.name}-{name}"
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    @property
    def reference(self) -> Reference:
        """The run without faults; made once."""
        if self._reference is None:
            folder = self._work / f"{self.tool.name}-reference"
            weights = self.tool.weights(folder) if folder.exists() else None  # of an earlier run with this scratch
            if weights is None:
                folder = self.folder("reference")
                start = Start(self.tool, self.nodes, folder, "first")
                gone, weights = start.wait_until_gone(600), self.tool.weights(folder)
                if gone is None or start.status or weights is None:
                    text = start.tail
                    start.close()
                    raise RuntimeError(f"{self.tool.name} does not train without faults\n{text}")
            steps = {trained.step: trained for trained in self.tool.trained(folder)}
            newest = newest_file(self.tool.checkpoints(folder)).parent
            size = sum(file.stat().st_size for file in newest.rglob("*") if file.is_file())
            self._reference = Reference(steps, weights, size)
        return self._reference

    def crashed(self, name: str) -> Path:
        """A copy of the folder of a job whose remote rank was killed after step FAULT_STEP."""
        crashed = self._work / f"{self.tool.name}-kill-remote-rank-crashed"
        if not crashed.exists():
            self.disturbed("kill-remote-rank", kill_remote, keep=True)
        copy = self.folder(name)
        shutil.rmtree(copy)
        shutil.copytree(crashed, copy, symlinks=True)
        return copy

    def disturbed(
        self, name: str, harm: Callable[[Start], None], *, restarts: int = 0, keep: bool = False,
        limited: bool = False,
    ) -> tuple[Cell, Start]:  # fmt: skip
        """Start a job, do `harm` when step FAULT_STEP is done, and see how it ends."""
        self.reference  # noqa: B018  so that caches are warm
        start = Start(self.tool, self.nodes, self.folder(name, limited=limited), "first", restarts=restarts)
        try:
            start.wait_for_step(FAULT_STEP)
            harm(start)
            cell = self.ended(start)
        finally:
            start.close()
        cell.reached = max(t.step for t in self.tool.trained(start.folder))
        if keep:
            crashed = start.folder.with_name(f"{start.folder.name}-crashed")
            shutil.rmtree(crashed, ignore_errors=True)
            shutil.copytree(start.folder, crashed, symlinks=True)
        return cell, start

    def ended(self, start: Start, patience: float = PATIENCE) -> Cell:
        """Wait for the end."""
        seconds = start.wait_until_gone(patience)
        left = processes.of_job(start.folder) if seconds is None else []
        return Cell(
            seconds=seconds,
            left=len(left),
            left_ranks=sum(process.rank is not None for process in left),
            launcher_seconds=start.launcher_seconds,
            status=start.status,
            last_line=start.last_line,
            rank_line=start.rank_line,
        )

    def resume(self, cell: Cell, folder: Path, *, ranks: int = 2) -> None:
        """Start again with the same command, and compare with the run without faults."""
        before = len(self.tool.trained(folder))
        start = Start(self.tool, self.nodes, folder, "again", ranks=ranks)
        try:
            if start.wait_until_gone(PATIENCE) is None:
                cell.note = f"the next start hangs; {cell.note}"
            cell.resume_status = start.status
        finally:
            start.close()
        cell.resume_line = start.rank_line if cell.resume_status else ""
        if cell.resume_status == 0:
            self.compare(cell, folder, before)

    def compare(self, cell: Cell, folder: Path, before: int) -> None:
        """Fill in what a start that ended well did after the first `before` steps."""
        trained = self.tool.trained(folder)
        if isinstance(self.tool, Ours):  # its log holds each step once
            cell.resumed = self.tool.resumed_at(folder)
            again = [t for t in trained if t.step > cell.resumed]
            cell.same_samples = all(close(t.loss, self.reference.steps[t.step].loss) for t in again)
        else:
            again = trained[before:]
            cell.resumed = again[0].step - 1 if again else None
            cell.same_samples = all(t.samples == self.reference.steps[t.step].samples for t in again)
        self.compare_weights(cell, folder)

    def compare_weights(self, cell: Cell, folder: Path) -> None:
        """Fill in the weights at the end."""
        if weights := self.tool.weights(folder):
            cell.same_weights = set(weights.digests) <= set(self.reference.weights.digests)
            cell.finite = weights.finite


def kill_remote(start: Start) -> None:
    """SIGKILL of the second node's rank."""
    processes.send(signal.SIGKILL, processes.ranks_of(start.folder, 1))


def close(a: float, b: float) -> bool:
    """Whether two losses are the same but for rounding."""
    return abs(a - b) <= 1e-5 * max(abs(a), abs(b))


def newest_file(folder: Path) -> Path:
    """The largest file of the newest checkpoint, told by time."""
    files = [f for f in folder.rglob("*") if f.is_file() and not f.is_symlink() and f.stat().st_size > 10_000]
    newest = max(f.stat().st_mtime for f in files)
    group = [f for f in files if f.stat().st_mtime > newest - 0.7]  # less than between two checkpoints
    return max(group, key=lambda f: f.stat().st_size)


def as_json(cell: Cell) -> dict[str, object]:
    """A cell without what it has not, on one level."""
    found = {key: value for key, value in asdict(cell).items() if value not in (None, "")}
    for key in ("seconds", "launcher_seconds"):
        if key in found:
            found[key] = round(float(str(found[key])), 1)
    for line in ("last_line", "rank_line", "resume_line"):
        if line in found:
            found[line] = tidy(str(found[line]))
    if cell.lost is not None:
        found["lost"] = cell.lost
    return found


def tidy(line: str) -> str:
    """At most 200 characters of a line of output, without colours, times, process ids and the machine's own paths."""
    line = re.sub(r"\x1b\[[0-9;]*m", "", line)
    line = re.sub(r"/\S*/(?=[\w.-]+)", ".../", line)
    return re.sub(r"\b\d{4}-\d\d-\d\d[ T_][\d:,.]+|\[?[EWI]?\d{4} \d\d:\d\d:\d\d\.\d+ \d+ ?", "", line).strip()[:200]
