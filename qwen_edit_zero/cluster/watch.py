"""A thread of each rank that looks whether others have failed or fallen silent, and ends this process if so."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, NoReturn

from qwen_edit_zero.cluster import last_words
from qwen_edit_zero.cluster.last_words import Failure, say
from qwen_edit_zero.cluster.pulse import SETUP_SECONDS, Pulse, Seen, Store
from qwen_edit_zero.cluster.warden import Warden

POLL_SECONDS = 0.5
GRACE_SECONDS = 2.0  # in which ranks that fail for the same reason find out that they do
LINGER_SECONDS = 2.5  # how long rank 0, which serves the store, waits for the others to have looked
LOST_SECONDS = 5.0  # after which a store that refuses to answer is gone
ALARM_SECONDS = 5.0  # for writing down stacks
FIRST, BY = "failure/first", "failure/by/"
_COUNT, _ALARM = "failure/count", "failure/alarm"


class Word:
    """A connection to the store in which failures are told."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.lock = threading.Lock()  # one request at a time over the connection

    def ask(self, key: str) -> dict[str, Any] | None:
        with self.lock:
            return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def tell(self, failure: Failure) -> None:
        record = json.dumps(asdict(failure) | {"detail": ""})
        with self.lock:
            self.store.set(f"{BY}{failure.by}", record)
            if self.store.add(_COUNT, 1) == 1:
                self.store.set(FIRST, record)

    def alarm(self, text: str) -> None:
        """Ask all ranks to write down where they are."""
        with self.lock:
            self.store.set(_ALARM, json.dumps({"text": text}))

    def wait_for(self, key: str, seconds: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + seconds
        while (found := self.ask(key)) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return found


class Watch(Word):
    """This rank's eyes on the others, and its pulse.

    `ends` ends this process for a failure that this rank is to tell the others, `hangs` for an alarm.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        ends: Callable[[Failure], NoReturn],
        hangs: Callable[[str], NoReturn],
    ) -> None:
        super().__init__(store)
        self.ends, self.hangs, self.first_host = ends, hangs, ""
        self.rank, self.host = rank, socket.gethostname()
        self.stopped = threading.Event()
        self.ending = threading.Event()
        self.silence = SETUP_SECONDS
        # After an alarm every rank writes down where it is; then one that knows of all ends the job, if it can.
        self.patience = ALARM_SECONDS * (1 if rank == 0 else 2 if rank == world_size - 1 else 3)
        self.answered = time.monotonic()
        self._claim = threading.Lock()
        self.pulse = Pulse(store, rank, world_size)
        self.warden = Warden(f"rank {rank} ({self.host})", self.silence)
        self.threads = [threading.Thread(target=run, name=run.__name__, daemon=True) for run in (self.look, self.guard)]
        for thread in self.threads:
            thread.start()

    def look(self) -> None:
        """See whether somebody has failed, or has fallen silent."""
        alarm: dict[str, Any] | None = None
        alarmed = 0.0
        while not self.stopped.wait(POLL_SECONDS):
            silent: list[Seen] = []
            try:
                found = self.ask(FIRST)
                if found is None:
                    with self.lock:
                        self.pulse.turn()
                        silent = self.pulse.silent(self.silence)
                        self.first_host = self.pulse.first_host or self.first_host
                    if alarm is None and (alarm := self.ask(_ALARM)) is not None:
                        alarmed = time.monotonic()
                        last_words.alarmed(alarm["text"])
            except Exception:  # whatever the store's client raises: it does not answer
                if self.stopped.wait(LOST_SECONDS) or self.ending.is_set():
                    return  # rank 0 had ended well, or this rank has noticed by itself
                self.lost("has probably ended: its store refuses to answer")
            self.answered = time.monotonic()
            if silent and not self.ending.is_set():
                self._end_for(silent)
            if alarm is not None and time.monotonic() - alarmed > self.patience and not self.ending.is_set():
                self.hangs(alarm["text"])
            if found is None:
                continue
            self.ending.wait(GRACE_SECONDS)  # this rank may be failing too, and then settles who speaks
            if self.ending.is_set() or self.stopped.is_set() or not self.claim():
                return
            self._end_with(Failure(**found))

    def claim(self) -> bool:
        """Whether this thread is the one that ends this process; the first that asks is."""
        return self._claim.acquire(blocking=False)

    def guard(self) -> None:
        """End this process when the store says nothing, not even that it is gone."""
        looked = time.monotonic()
        while not self.stopped.wait(1.0):
            self.warden.alive(self.silence)
            now = time.monotonic()
            if now - looked > LOST_SECONDS:
                self.answered = now  # this process itself was stopped, perhaps all of them
            looked = now
            if now - self.answered > self.silence:
                self.lost(f"has not answered for {self.silence:.0f} s: it is frozen, or its node is cut off")

    def lost(self, how: str) -> NoReturn:
        """Rank 0 is gone, and so is the way to tell anybody."""
        failure = Failure(0, self.first_host or "its host", how, 1, by=self.rank, by_host=self.host)
        say(f"error on rank {self.rank} ({self.host}): lost contact with rank 0 ({failure.host}), which {how}")
        last_words.close(failure, speaks=True)
        last_words.leave(1)

    def _end_with(self, first: Failure) -> NoReturn:
        if self.rank == 0 and first.by_host != self.host:
            say(first.shown(alone=True))
        last_words.close(first, speaks=self.rank == 0)
        if self.rank == 0:
            time.sleep(LINGER_SECONDS)
        last_words.leave(first.status)

    def _end_for(self, silent: list[Seen]) -> NoReturn:
        first = silent[0]
        others = f", as has {', '.join(str(other.rank) for other in silent[1:4])}" if silent[1:] else ""
        text = (
            f"it has given no sign of life for {self.silence:.0f} s (last: {first.doing}): it is frozen, or its node "
            f"is cut off or gone{others}"
        )
        failure = Failure(first.rank, first.host, text, 1, by=self.rank, by_host=self.host, step=first.step)
        for seen in silent:
            _kill_brother(seen, self.host)
        self.ends(failure)


def _kill_brother(seen: Seen, host: str) -> None:
    """End a frozen process of the same launcher on this node, for which the launcher would wait."""
    if seen.host != host:
        return
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{seen.process}/stat", encoding="utf-8") as file:
            parent = int(file.read().rpartition(")")[2].split()[1])
        if parent == os.getppid() != 1:
            os.kill(seen.process, signal.SIGKILL)
