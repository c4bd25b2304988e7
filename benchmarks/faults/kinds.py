"""The faults, one function each. What is drawn at random is drawn from the campaign's seed."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.faults.agent import BAD_READ, BUG
from benchmarks.faults.site import Job, Site, until
from benchmarks.faults.training import newest_checkpoint


@dataclass(frozen=True)
class Scene:
    """Where a fault is made: the job that trains, its run folder, and a file that may fill the run's disk."""

    site: Site
    job: Job
    run: Path
    drawn: random.Random
    ballast: Path

    def some_rank(self) -> tuple[int, int]:
        """A rank and its process."""
        ranks = self.site.ranks(self.job)
        rank = self.drawn.choice(sorted(ranks))
        return rank, ranks[rank]


@dataclass(frozen=True)
class Made:
    """A fault that has been made.

    Attributes:
        rank: whose last line must name it; None: no rank in particular.
        cause: words, one of which that line must have; none: it is not looked for.
        gone: nodes whose processes cannot be reached, and are not waited for.
        ends: whether the job is expected to end by itself; else it may go on.
        after_end: when its processes are gone, before the next start.
        after_restart: when the next start trains. Returns whether all was as it must be.
        lived_on: the job's processes may live while the next start trains; they must be gone soon after.
    """

    rank: int | None = None
    cause: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    ends: bool = True
    after_end: Callable[[], None] = lambda: None
    after_restart: Callable[[], None] = lambda: None
    lived_on: bool = False


DEAD = ("without a word", "lost contact")
SILENT = (
    "no sign of life",
    "lost contact",
    "has not answered",
    "was frozen",
    "without a word",
    "Timed out",
    "timed out",
)


def kill_a_rank(scene: Scene) -> Made:
    rank, pid = scene.some_rank()
    scene.site.signal(pid, signal.SIGKILL)
    return Made(rank, DEAD)


def kill_in_a_save(scene: Scene) -> Made:
    folder = scene.run / "checkpoints"
    rank, pid = scene.some_rank()
    deadline = time.monotonic() + 30
    while not any(folder.glob(".step-*.partial")) and time.monotonic() < deadline:
        time.sleep(0.001)
    scene.site.signal(pid, signal.SIGKILL)
    return Made(rank, DEAD)


def freeze_a_rank(scene: Scene) -> Made:
    rank, pid = scene.some_rank()
    scene.site.signal(pid, signal.SIGSTOP)
    return Made(rank, SILENT)


def bug_in_a_rank(scene: Scene) -> Made:
    rank, pid = scene.some_rank()
    scene.site.signal(pid, BUG)
    return Made(rank, ("a bug in the training code",))


def unreadable_data(scene: Scene) -> Made:
    rank, pid = scene.some_rank()
    scene.site.signal(pid, BAD_READ)
    return Made(rank, ("Input/output error",))


def preempt_one(scene: Scene) -> Made:
    rank, pid = scene.some_rank()
    scene.site.signal(pid, scene.drawn.choice([signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM]))
    return Made(rank, ("was asked to end",))


def preempt_all(scene: Scene) -> Made:
    for pid in scene.site.ranks(scene.job).values():
        scene.site.signal(pid, signal.SIGTERM)
    return Made(None, ("was asked to end",))


def crash_a_node(scene: Scene) -> Made:
    rank, _ = scene.some_rank()
    name = scene.job.hosts[rank]
    scene.site.away.add(name)
    scene.site.nodes.crash(name)
    return Made(rank, DEAD, after_restart=lambda: scene.site.come_back(name))


def cut_a_node_off(scene: Scene) -> Made:
    rank, _ = scene.some_rank()
    name = scene.job.hosts[rank]
    scene.site.away.add(name)
    scene.site.nodes.cut(name)

    def heal() -> None:
        scene.site.nodes.heal(name)
        scene.site.away.discard(name)

    return Made(rank, SILENT, after_restart=heal)


def pause_a_node(scene: Scene) -> Made:
    """With rank 0 on it, which writes the run folder: it comes back when another start has it."""
    name = scene.job.hosts[0]
    scene.site.away.add(name)
    scene.site.nodes.cut(name)
    scene.site.nodes.pause(name)

    def resume() -> None:
        scene.site.nodes.resume(name)
        scene.site.nodes.heal(name)
        scene.site.away.discard(name)

    return Made(0, SILENT, gone=(name,), after_restart=resume, lived_on=True)


def fill_the_disk(scene: Scene) -> Made:
    with scene.ballast.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"\0" * 65536)
        except OSError:
            pass
    return Made(None, ("No space left", "disk is full", "is full"), after_end=lambda: scene.ballast.unlink())


def flip_a_bit(scene: Scene) -> Made:
    _have_two_checkpoints(scene)
    made = kill_a_rank(scene)
    return Made(made.rank, made.cause, after_end=lambda: _damage(scene, truncate=False))


def cut_a_file_short(scene: Scene) -> Made:
    _have_two_checkpoints(scene)
    made = kill_a_rank(scene)
    return Made(made.rank, made.cause, after_end=lambda: _damage(scene, truncate=True))


def _have_two_checkpoints(scene: Scene) -> None:
    """Where all are damaged, the run rightly refuses to begin anew."""
    until(lambda: len(list((scene.run / "checkpoints").glob("step-*"))) > 1, 300)


def _damage(scene: Scene, *, truncate: bool) -> None:
    newest = newest_checkpoint(scene.run)
    if newest is None:
        return
    file = scene.drawn.choice(sorted(newest.glob("*.safetensors")))
    size = file.stat().st_size
    at = scene.drawn.randrange(size)
    with file.open("r+b") as opened:
        if truncate:
            os.truncate(opened.fileno(), at)
        else:
            old = os.pread(opened.fileno(), 1, at)
            os.pwrite(opened.fileno(), bytes([old[0] ^ 1 << scene.drawn.randrange(8)]), at)


def kill_the_launcher(scene: Scene) -> Made:
    for pid in scene.site.launcher_pids():
        scene.site.signal(pid, signal.SIGKILL)
    return Made(lived_on=True)


def hang_up_ssh(scene: Scene) -> Made:
    name = scene.drawn.choice(sorted(set(scene.job.hosts)))
    scene.site.nodes.hang_up(name)
    return Made(ends=False)


def short_cut(scene: Scene) -> Made:
    name = scene.drawn.choice(sorted(set(scene.job.hosts)))
    scene.site.nodes.cut(name)
    time.sleep(4)
    scene.site.nodes.heal(name)
    return Made(ends=False)


def slow_link(scene: Scene) -> Made:
    name = scene.drawn.choice(sorted(set(scene.job.hosts)))
    scene.site.nodes.slow(name, "2mbit")
    time.sleep(6)
    scene.site.nodes.fast(name)
    return Made(ends=False)


def suspend_the_job(scene: Scene) -> Made:
    for name in sorted(set(scene.job.hosts)):
        scene.site.nodes.pause(name)
    time.sleep(6)
    for name in sorted(set(scene.job.hosts)):
        scene.site.nodes.resume(name)
    return Made(ends=False)


Fault = Callable[[Scene], Made]
# Kind: how it is called, and its share of a plan
KINDS: dict[Fault, tuple[str, int]] = {
    kill_a_rank: ("a rank killed (SIGKILL)", 6),
    kill_in_a_save: ("a rank killed during a save", 5),
    bug_in_a_rank: ("an exception in a rank", 4),
    unreadable_data: ("data that cannot be read", 3),
    freeze_a_rank: ("a rank frozen (SIGSTOP)", 3),
    crash_a_node: ("a node crashes", 4),
    cut_a_node_off: ("a node cut off, healed after the restart", 3),
    pause_a_node: ("rank 0's node paused and cut off, back after the restart", 2),
    flip_a_bit: ("a rank killed, and a bit flipped in the newest checkpoint", 3),
    cut_a_file_short: ("a rank killed, and a file of the newest checkpoint cut short", 3),
    fill_the_disk: ("the disk full", 3),
    kill_the_launcher: ("the launcher killed (SIGKILL), and started again", 2),
    hang_up_ssh: ("a node's ssh sessions killed", 3),
    preempt_one: ("preempted: a signal to one rank", 4),
    preempt_all: ("preempted: SIGTERM to all ranks", 3),
    short_cut: ("a link down for 4 s", 4),
    slow_link: ("a link at 2 Mbit/s for 6 s", 4),
    suspend_the_job: ("the whole job suspended for 6 s", 2),
}


def plan(faults: int, seed: int) -> list[Fault]:
    """So many faults in an order drawn from the seed: every kind at least once, if there are enough, then by share."""
    drawn = random.Random(seed)
    once = list(KINDS)
    drawn.shuffle(once)
    shares = [kind for kind, (_, share) in KINDS.items() for _ in range(share - 1)]
    more: list[Fault] = []
    while len(once) + len(more) < faults:
        drawn.shuffle(shares)
        more += shares
    chosen = (once + more)[:faults]
    drawn.shuffle(chosen)
    return chosen
