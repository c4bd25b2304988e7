"""Faults, one after another, and what became of each."""

from __future__ import annotations

import contextlib
import random
import re
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.faults.kinds import KINDS, Fault, Made, Scene
from benchmarks.faults.site import Job, Site, until
from benchmarks.faults.training import last_step

GONE_SECONDS = 60.0  # within which every process must be gone
START_SECONDS = 240.0  # a start may take, on a busy machine


@dataclass
class Outcome:
    """What became of a fault. Seconds are from the moment it was made.

    Attributes:
        at: seconds since the campaign began.
        went_on: the job trained on without a new start.
        gone_seconds: until every process of the job had gone; None: it went on.
        next_step_seconds: until a step was recorded that had not been done before the fault; for one that the job
            survived, until its next step.
        lost_steps: recorded before, and done again.
        status: of the launcher.
        named: whether the last lines named rank, host and cause; None: not looked for.
    """

    kind: str
    at: float
    step: int
    rank: int | None = None
    host: str = ""
    went_on: bool = False
    gone_seconds: float | None = None
    next_step_seconds: float | None = None
    lost_steps: int = 0
    status: int | None = None
    named: bool | None = None
    survived: bool = True
    last_lines: list[str] = field(default_factory=list)
    note: str = ""


class Recorder:
    """The last recorded step over time, every fifth of a second; a context manager."""

    def __init__(self, run: Path) -> None:
        self.began = time.monotonic()
        self.points: list[tuple[float, int]] = []
        self._run, self._stopped = run, threading.Event()
        self._thread = threading.Thread(target=self._record, daemon=True)

    def now(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _record(self) -> None:
        while not self._stopped.wait(0.2):
            with contextlib.suppress(ValueError, KeyError):
                step = last_step(self._run)
                if not self.points or self.points[-1][1] != step:
                    self.points.append((round(self.now(), 2), step))


class Campaign:
    """Makes the faults of a plan at even distances, and starts the training again after each that ends it."""

    def __init__(
        self, site: Site, run: Path, command: list[str], recorder: Recorder, ballast: Path, seed: int,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.site, self.run, self.command, self.recorder, self.ballast = site, run, command, recorder, ballast
        self.drawn = random.Random(seed)
        self.say = say
        self.outcomes: list[Outcome] = []
        self.job: Job | None = None
        self.unplanned = 0  # ends of a job that no fault had been made for
        self.enough = False  # no further fault is to be made
        self._stale: list[tuple[Job, Outcome, float]] = []

    def go(self, plan: list[Fault], minutes: float) -> None:
        """Make all faults, and train until the time is over."""
        for number, fault in enumerate(plan):
            if self.enough:
                self.say(f"asked to stop after {number} of {len(plan)} faults")
                break
            self._train_on_somehow(steps=2 + self.drawn.randrange(6))
            due = number * minutes * 60 / len(plan)
            until(lambda due=due: self.recorder.now() >= due or not self._lives(), 3600)  # type: ignore[misc]
            try:
                self._suffer(number, len(plan), fault)
            except (AssertionError, RuntimeError, OSError, subprocess.SubprocessError) as error:
                self._give_up(error)
        self._train_on_somehow(steps=5)
        until(lambda: self.recorder.now() > minutes * 60, 3600)
        self._see_stale_ones_end()

    def _give_up(self, error: Exception) -> None:
        """A fault after which the run could not go on: all that is left of it is ended by hand, and counted so."""
        outcome = self.outcomes[-1]
        outcome.survived = False
        outcome.note += str(error)
        self.say(f"{told(outcome)}")
        for name in sorted(self.site.away):
            if not self.site.nodes.everything(name):
                self.site.come_back(name)
            self.site.nodes.resume(name)
            self.site.nodes.heal(name)
            self.site.away.discard(name)
        for job in [self.job, *(job for job, _, _ in self._stale)]:
            if job is not None:
                self.site.end(job)
        self._stale.clear()
        self.ballast.unlink(missing_ok=True)
        self.job = None

    def stop(self) -> None:
        """Preempt the job."""
        assert self.job is not None
        for pid in self.site.ranks(self.job).values():
            self.site.signal(pid, 15)
        assert until(lambda: not self.site.left(self.job), GONE_SECONDS), "no end"  # type: ignore[arg-type]
        self.site.end(self.job)

    def finish(self, command: list[str], seconds: float = START_SECONDS) -> Job:
        """Start a job and wait for its end."""
        job = self.site.start(command)
        job.launcher.wait(seconds)
        return job

    def _lives(self) -> bool:
        return self.job is not None and self.job.launcher.poll() is None

    def _train_on_somehow(self, steps: int) -> None:
        """Train on; where the job ends without a fault, say and count so, and start it again."""
        for attempt in range(3):
            try:
                self._train_on(steps)
                return
            except AssertionError as error:
                self.unplanned += 1
                self.say(f"not planned: {error}")
                if attempt == 2:
                    raise
                if self.job is not None:
                    self.site.end(self.job)
                self.job = None

    def _train_on(self, steps: int) -> None:
        """Until the job has recorded so many more steps; a job that has ended is started."""
        if not self._lives():
            if self.job is not None:
                self.site.end(self.job)
            self.job = self.site.start(self.command)
            job = self.job
            began = until(lambda: "training steps" in job.text() or not self._lives(), START_SECONDS)
            assert began, f"no start: {job.text()}"
        before = last_step(self.run)
        done = until(lambda: last_step(self.run) >= before + steps or not self._lives(), START_SECONDS)
        told = self.job.text() if self.job else ""
        assert done, f"no {steps} steps after {before}: {told}"
        assert self._lives(), f"it ended by itself after step {before}: {told}"

    def _suffer(self, number: int, of: int, fault: Fault) -> None:
        assert self.job is not None
        job, name = self.job, KINDS[fault][0]
        before = last_step(self.run)
        outcome = Outcome(name, round(self.recorder.now(), 1), before)
        self.outcomes.append(outcome)
        began = time.monotonic()
        made = fault(Scene(self.site, job, self.run, self.drawn, self.ballast))
        if made.rank is not None:
            outcome.rank, outcome.host = made.rank, job.hosts[made.rank]
        if made.lived_on and not made.gone:
            before = self._start_beside(job, outcome, before)
        elif self._goes_on(job, made):
            outcome.went_on = True
            outcome.next_step_seconds = round(time.monotonic() - began, 1)
        else:
            before = self._ended(job, made, outcome, began, before)
            made.after_end()
            self.job = None
            self._start_again(outcome, began, before)
            self._read_last_lines(job, made, outcome)  # by now all of them have come through ssh
        if made.lived_on and made.gone:
            self._stale.append((job, outcome, time.monotonic()))
        made.after_restart()
        self._see_stale_ones_end()
        self._judge(outcome)
        self.say(f"fault {number + 1} of {of} at {outcome.at:.0f} s: {told(outcome)}")

    def _goes_on(self, job: Job, made: Made) -> bool:
        """Whether the job trains on, of a fault that need not end it."""
        if made.ends:
            return False
        before = last_step(self.run)
        until(lambda: last_step(self.run) > before + 1 or not self.site.left(job), GONE_SECONDS)
        return self._lives() and last_step(self.run) > before + 1

    def _ended(self, job: Job, made: Made, outcome: Outcome, began: float, before: int) -> int:
        """Wait until a job has gone; returns the last step it recorded."""
        # A full disk is noticed by the next save
        all_gone = until(lambda: not self.site.left(job, but=made.gone), GONE_SECONDS)
        outcome.gone_seconds = round(time.monotonic() - began, 1)
        if not all_gone:
            outcome.survived = False
            outcome.note += f"still there: {self.site.ranks(job)}; "
        if not made.gone:
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.launcher.wait(max(5.0, GONE_SECONDS - outcome.gone_seconds))
        if job.launcher.poll() is None:
            outcome.note += "the launcher waited on; "
            if not made.gone:
                outcome.survived = False
        else:
            outcome.status = job.launcher.returncode
        if not made.gone:
            self.site.end(job)
        return max(before, last_step(self.run))

    def _read_last_lines(self, job: Job, made: Made, outcome: Outcome) -> None:
        lines = [line for line in job.text().splitlines() if line.strip()]
        # What pdsh and ssh add is not the job's own last word
        own = [line for line in lines if not re.match(r"(pdsh@|Connection |client_loop|\S+: ssh exited)", line)]
        outcome.last_lines = [re.sub(r"^node\d: ", "", line) for line in own[-3:]]
        if made.cause:
            text = "\n".join(own[-8:])
            host = outcome.host
            addressed = not host or host in text or self.site.nodes.address(host) in text
            numbered = outcome.rank is None or re.search(rf"rank {outcome.rank}\b", text) is not None
            outcome.named = addressed and numbered and any(word in text for word in made.cause)

    def _start_again(self, outcome: Outcome, began: float, before: int) -> None:
        job = self.job = self.site.start(self.command)
        assert until(lambda: "training steps" in job.text() or not self._lives(), START_SECONDS), job.text()
        started = re.search(r"training steps (\d+) to", job.text())
        if started is None:
            outcome.survived = False
            outcome.note += "the next start failed; "
            raise RuntimeError(f"the start after '{outcome.kind}' failed:\n{job.text()}")
        outcome.lost_steps = before - int(started[1]) + 1
        assert until(lambda: last_step(self.run) > before or not self._lives(), START_SECONDS), job.text()
        outcome.next_step_seconds = round(time.monotonic() - began, 1)

    def _start_beside(self, job: Job, outcome: Outcome, before: int) -> int:
        """Start again while the ranks of a job whose launcher is gone may live; they must make room."""
        began = time.monotonic()
        until(lambda: not self.site.left(job), 3)  # else they train on, unseen
        if self.site.left(job):
            outcome.note += "its ranks trained on until the next start; "
        before = max(before, last_step(self.run))
        self._start_again(outcome, began, before)
        if not until(lambda: not self.site.left(job), GONE_SECONDS):
            outcome.survived = False
            outcome.note += "its ranks stayed; "
        outcome.gone_seconds = round(time.monotonic() - began, 1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            outcome.status = job.launcher.wait(5)  # it was killed
        return before

    def _see_stale_ones_end(self) -> None:
        """Copies that came back when another start had the run folder: they must end."""
        for job, outcome, back in self._stale:
            if not until(lambda job=job: not self.site.left(job), GONE_SECONDS):  # type: ignore[misc]
                outcome.survived = False
                outcome.note += "the copy that came back stayed; "
            outcome.note += f"the copy that came back ended after {time.monotonic() - back:.1f} s; "
            with contextlib.suppress(subprocess.TimeoutExpired):
                outcome.status = job.launcher.wait(45)
        self._stale.clear()

    def _judge(self, outcome: Outcome) -> None:
        """A job that failed must say so; one that was asked to end must lose nothing."""
        if outcome.went_on:
            return
        if outcome.status == 0:
            outcome.survived = False
            outcome.note += "status 0; "
        if outcome.kind.startswith("preempted") and (outcome.status != 75 or outcome.lost_steps):
            outcome.survived = False
            outcome.note += "preempted with a loss, or another status; "


def told(outcome: Outcome) -> str:
    """An outcome in a line."""
    where = f", rank {outcome.rank} on {outcome.host}" if outcome.rank is not None else ""
    how = (
        "the job went on"
        if outcome.went_on
        else f"gone after {outcome.gone_seconds} s, status {outcome.status}, named {outcome.named}, "
        f"{outcome.lost_steps} steps lost"
    )
    fate = "survived" if outcome.survived else "NOT SURVIVED"
    return f"{outcome.kind}{where}: {how}, next step after {outcome.next_step_seconds} s, {fate} {outcome.note}"


def as_json(outcomes: list[Outcome]) -> list[dict[str, Any]]:
    """For the report's file."""
    return [asdict(outcome) for outcome in outcomes]
