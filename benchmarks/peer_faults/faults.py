"""The faults: each starts jobs, does its harm, and returns what was seen."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.peer_faults import processes
from benchmarks.peer_faults.bench import FAULT_STEP, PATIENCE, Bench, Cell, close, kill_remote, newest_file
from benchmarks.peer_faults.job import START_SECONDS, Start
from benchmarks.peer_faults.tools import NODES, SETTINGS, Ours


def _sizes(folder: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                status = os.stat(os.path.join(path, name))
            except OSError:
                continue
            found[os.path.join(path, name)] = (status.st_ino, status.st_size)
    return found


def term_launchers(bench: Bench) -> Cell:
    """SIGTERM to the launcher, on torchrun's nodes to each: a preemption."""
    cell, start = bench.disturbed(
        "term-launchers", lambda s: processes.send(signal.SIGTERM, s.real_launchers()),
    )  # fmt: skip
    bench.resume(cell, start.folder)
    return cell


def term_ranks(bench: Bench) -> Cell:
    """SIGTERM to every rank."""
    cell, start = bench.disturbed(
        "term-ranks", lambda s: processes.send(signal.SIGTERM, processes.ranks_of(s.folder, 0, 1))
    )
    bench.resume(cell, start.folder)
    return cell


def kill_rank(bench: Bench) -> Cell:
    """SIGKILL of the first node's rank."""
    cell, start = bench.disturbed(
        "kill-rank", lambda s: processes.send(signal.SIGKILL, processes.ranks_of(s.folder, 0))
    )
    bench.resume(cell, start.folder)
    return cell


def kill_remote_rank(bench: Bench) -> Cell:
    """SIGKILL of the second node's rank."""
    cell, start = bench.disturbed("kill-remote-rank", kill_remote, keep=True)
    bench.resume(cell, start.folder)
    return cell


def kill_with_restarts(bench: Bench) -> Cell:
    """SIGKILL of the second node's rank where the launcher may restart."""
    if bench.tool.launcher == "deepspeed":
        return Cell(note="the launcher has no such option without an elastic batch")
    before = 0

    def harm(start: Start) -> None:
        nonlocal before
        before = len(bench.tool.trained(start.folder))
        processes.send(signal.SIGKILL, processes.ranks_of(start.folder, 1))

    cell, start = bench.disturbed("kill-with-restarts", harm, restarts=1)
    cell.reached = FAULT_STEP
    if cell.status == 0:
        bench.compare(cell, start.folder, before)
    return cell


def stop_rank(bench: Bench) -> Cell:
    """SIGSTOP of the second node's rank."""
    cell, _ = bench.disturbed("stop-rank", lambda s: processes.send(signal.SIGSTOP, processes.ranks_of(s.folder, 1)))
    return cell


def cut_cable(bench: Bench) -> Cell:
    """The second node's cable is pulled."""
    try:
        cell, _ = bench.disturbed("cut-cable", lambda s: bench.nodes.cut(NODES[1]))
    finally:
        bench.nodes.heal(NODES[1])
    return cell


def kill_in_save(bench: Bench) -> Cell:
    """SIGKILL of everything while a checkpoint is written."""
    caught: list[str] = []

    def harm(start: Start) -> None:
        folder, pids = bench.tool.checkpoints(start.folder), [p.pid for p in processes.of_job(start.folder)]
        before, deadline = _sizes(folder), time.monotonic() + 60
        while time.monotonic() < deadline:
            now = _sizes(folder)
            if any(size > 0 and before.get(name) != (inode, size) for name, (inode, size) in now.items()):
                break
            if any(size < before[name][1] for name, (_, size) in now.items() if name in before):
                break
        processes.send(signal.SIGKILL, pids)
        time.sleep(0.5)
        now = _sizes(folder)
        written = sum(size for name, (inode, size) in now.items() if before.get(name) != (inode, size))
        caught.append(f"{100 * written / bench.reference.checkpoint_bytes:.0f}% of it written")

    for _ in range(2):
        cell, start = bench.disturbed("kill-in-save", harm)
        cell.note = caught[-1]
        if int(caught[-1].split("%")[0]) < 95:
            break
    bench.resume(cell, start.folder)
    return cell


def truncated_checkpoint(bench: Bench) -> Cell:
    """The largest file of the newest checkpoint is cut to half."""
    folder = bench.crashed("truncated")
    named = bench.tool.resumes_from
    file = bench.tool.checkpoints(folder) / named if named else newest_file(bench.tool.checkpoints(folder))
    os.truncate(file, file.stat().st_size // 2)
    cell = Cell(reached=FAULT_STEP)
    bench.resume(cell, folder)
    return cell


def other_ranks(bench: Bench) -> Cell:
    """The crashed job goes on with one rank; its samples a step stay, as the scripts divide them by the ranks."""
    folder = bench.crashed("other-ranks")
    cell, before = Cell(reached=FAULT_STEP), len(bench.tool.trained(folder))
    bench.resume(cell, folder, ranks=1)
    if cell.resume_status == 0:
        trained = bench.tool.trained(folder)
        again = (
            trained[before:]
            if not isinstance(bench.tool, Ours)
            else [t for t in trained if t.step > (cell.resumed or 0)]
        )
        first = again[0]
        cell.note = "same" if close(first.loss, bench.reference.steps[first.step].loss) else "another"
        cell.note += " next loss"
    return cell


def full_disk(bench: Bench) -> Cell:
    """The disk has room for half of the next checkpoint; there is room again at the next start."""
    filler = bench.limited / "filler"
    filler.unlink(missing_ok=True)

    def fill(start: Start) -> None:
        usage = shutil.disk_usage(bench.limited)
        room = bench.reference.checkpoint_bytes // 2
        with filler.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(1, usage.free - room))

    try:
        cell, start = bench.disturbed("full-disk", fill, limited=True)
        filler.unlink(missing_ok=True)
        if cell.status != 0:
            bench.resume(cell, start.folder)
        else:
            bench.compare_weights(cell, start.folder)
    finally:
        filler.unlink(missing_ok=True)
        shutil.rmtree(bench.limited / f"{bench.tool.name}-full-disk", ignore_errors=True)
    return cell


def nan_loss(bench: Bench) -> Cell:
    """The loss of one step is not a number."""
    bench.reference  # noqa: B018
    start = Start(bench.tool, bench.nodes, bench.folder("nan"), "first", nan_step=6)
    try:
        cell = bench.ended(start, START_SECONDS + PATIENCE)
    finally:
        start.close()
    cell.reached = max((t.step for t in bench.tool.trained(start.folder)), default=0)
    bench.compare_weights(cell, start.folder)
    return cell


def two_starts(bench: Bench) -> Cell:
    """The same command is typed again while the job runs, which it would for some minutes more."""
    first = Start(bench.tool, bench.nodes, bench.folder("two-starts"), "first", steps=400)
    second = None
    try:
        first.wait_for_step(8)
        second = Start(bench.tool, bench.nodes, first.folder, "second", steps=400)
        deadline = time.monotonic() + PATIENCE
        while second.launchers[0].poll() is None and _twice(bench, first) < 10 and time.monotonic() < deadline:
            time.sleep(0.1)
        status, reached = second.status, max(t.step for t in bench.tool.trained(first.folder))
        with contextlib.suppress(RuntimeError):
            first.wait_for(lambda: any(t.step > reached + 2 for t in bench.tool.trained(first.folder)), "life", 20)
        cell = Cell(status=status, rank_line=second.rank_line, resume_status=first.status)
        alive = "goes on" if first.status is None else f"has ended with {first.status}"
        cell.note = f"{_twice(bench, first)} steps trained twice; the first {alive}"
    finally:
        first.close()
        for launcher in second.launchers if second else []:
            launcher.wait()
    return cell


def _twice(bench: Bench, start: Start) -> int:
    steps = [t.step for t in bench.tool.trained(start.folder)]
    return len(steps) - len(set(steps))


def other_setting(bench: Bench) -> Cell:
    """The second node's file of settings has another learning rate."""
    bench.reference  # noqa: B018
    start = Start(bench.tool, bench.nodes, bench.folder("other-setting"), "first", on_node2={"lr": 10 * SETTINGS["lr"]})
    try:
        cell = bench.ended(start, START_SECONDS + PATIENCE)
    finally:
        start.close()
    cell.reached = max((t.step for t in bench.tool.trained(start.folder)), default=0)
    if weights := bench.tool.weights(start.folder):
        cell.note = f"{len(set(weights.digests))} different models at the end"
    bench.compare_weights(cell, start.folder)
    return cell


FAULTS: dict[str, Callable[[Bench], Cell]] = {
    fault.__name__: fault
    for fault in (
        term_launchers, term_ranks, kill_rank, kill_remote_rank, kill_with_restarts, stop_rank, cut_cable, kill_in_save,
        truncated_checkpoint, full_disk, nan_loss, two_starts, other_ranks, other_setting,
    )
}  # fmt: skip
