"""How a job ends when something is wrong: one clear message, one exit status, and no process left behind.

Before the ranks have met (see `process_group.start`), a mistake is nearly always every rank's mistake: rank 0 says it,
and the others say it only if nothing has ended them a few seconds later. Afterwards a failing rank leaves word in the
job's store; a thread of every other rank looks there and ends its process, even if it is inside a collective.

Exit status: 2 for what the user can mend (UserError), 130 for Ctrl-C, 1 for the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NoReturn, Protocol

from qwen_edit_zero.cluster.identity import discover, guess_ranks
from qwen_edit_zero.cluster.mpi import abort_if_initialised
from qwen_edit_zero.errors import QwenEditError

POLL_SECONDS = 0.5
GRACE_SECONDS = 2.0  # in which ranks that fail for the same reason find out that they do
LINGER_SECONDS = 2.5  # how long rank 0, which serves the store, waits for the others to have looked
LOST_SECONDS = 5.0  # after which a store that does not answer is gone
_PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Socket closed", "remote process exited")
_FIRST, _COUNT, _BY = "failure/first", "failure/count", "failure/by/"


class Store(Protocol):
    """What is needed of torch's stores."""

    def add(self, key: str, amount: int, /) -> int: ...
    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...


@dataclass(frozen=True)
class Failure:
    """Why a rank ends. Two ranks with the same `text` fail alike; `detail` (a traceback) is shown before it."""

    rank: int
    host: str
    text: str
    status: int
    detail: str = ""

    def shown(self, *, alone: bool) -> str:
        """What the user sees; `alone` if this rank is not rank 0 speaking for all."""
        where = f" on rank {self.rank} ({self.host})" if alone else ""
        if self.status == 130:
            return f"interrupted{where}"
        return f"{self.detail}error{where}: {self.text}"


class _Watch:
    """This rank's connection to the store in which failures are told."""

    def __init__(self, store: Store, rank: int) -> None:
        self.store, self.rank, self.host = store, rank, socket.gethostname()
        self.stopped = threading.Event()
        self.ending = threading.Event()
        self.lock = threading.Lock()  # one request at a time over the connection
        self.thread = threading.Thread(target=self._look, name="failure-watch", daemon=True)
        self.thread.start()

    def ask(self, key: str) -> dict[str, Any] | None:
        with self.lock:
            return json.loads(self.store.get(key)) if self.store.check([key]) else None

    def tell(self, failure: Failure) -> None:
        record = json.dumps(asdict(failure) | {"detail": ""})
        with self.lock:
            self.store.set(f"{_BY}{self.rank}", record)
            if self.store.add(_COUNT, 1) == 1:
                self.store.set(_FIRST, record)

    def wait_for(self, key: str, seconds: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + seconds
        while (found := self.ask(key)) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return found

    def _look(self) -> None:
        while not self.stopped.wait(POLL_SECONDS):
            try:
                found = self.ask(_FIRST)
            except Exception:  # whatever the store's client raises: it does not answer
                if self.stopped.wait(LOST_SECONDS) or self.ending.is_set():
                    return  # rank 0 had ended well, or this rank has noticed by itself
                _say(f"error on rank {self.rank} ({self.host}): lost contact with rank 0, which has probably ended")
                _leave(1)
            if found is None:
                continue
            self.ending.wait(GRACE_SECONDS)  # this rank may be failing too, and then settles who speaks
            if self.ending.is_set() or self.stopped.is_set():
                return
            first = Failure(**found)
            if self.rank == 0 and first.host != self.host:
                _say(first.shown(alone=True))
            if self.rank == 0:
                time.sleep(LINGER_SECONDS)
            _leave(first.status)


_watch: _Watch | None = None


def watch(store: Store, rank: int) -> None:
    """Begin to look for failures of other ranks in `store`, which must be this thread's own connection."""
    global _watch
    assert _watch is None, "watching already"
    _watch = _Watch(store, rank)


def unwatch() -> None:
    """Stop looking: the job ends well."""
    global _watch
    if _watch is not None:
        _watch.stopped.set()
        _watch.thread.join(2 * POLL_SECONDS)
        _watch = None


def run_guarded(main: Callable[[], int]) -> int:
    """Return `main()`, the exit status of this process; if it raises, end this process and all other ranks."""
    try:
        return main()
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and _watch is None:
            # Whoever read our output has seen enough (`| head`). The interpreter would complain again as it flushes.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 128 + signal.SIGPIPE
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return 0
        return _end(*_describe(error))


def _describe(error: BaseException) -> tuple[str, int, str]:
    """The text, exit status and traceback (if one helps) of what `main` raised."""
    if isinstance(error, SystemExit):
        if isinstance(error.code, int):
            return f"the program ended itself with status {error.code}", error.code, ""
        return str(error.code), 1, ""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130, ""
    if isinstance(error, QwenEditError):
        return str(error), error.exit_status, ""
    if any(sign in str(error) for sign in _PEER_GONE):
        return "another rank ended without a word (killed, or out of memory?); see its node's log", 1, ""
    return f"{type(error).__name__}: {error}", 1, "".join(traceback.format_exception(error)[:-1])


def _end(text: str, status: int, detail: str) -> NoReturn:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    if _watch is not None:
        _end_after_meeting(Failure(_watch.rank, socket.gethostname(), text, status, detail), _watch)
    _end_before_meeting(text, status, detail)


def _end_before_meeting(text: str, status: int, detail: str) -> NoReturn:
    rank, local_rank = guess_ranks()
    failure = Failure(rank or 0, socket.gethostname(), text, status, detail)
    if failure.rank == 0:
        _say(failure.shown(alone=False))
        _leave(status)
    time.sleep(GRACE_SECONDS if local_rank == 0 else 2 * GRACE_SECONDS)  # the launcher ends this process meanwhile
    _say(failure.shown(alone=True))
    with contextlib.suppress(Exception):
        _tell_late(failure)
    _leave(status)


def _tell_late(failure: Failure) -> None:
    """Leave word for ranks that wait for this one to meet them, if they do; they would wait for minutes."""
    identity = discover()
    if identity.world_size == 1 or not identity.master_addr:
        return
    socket.create_connection((identity.master_addr, identity.master_port), timeout=GRACE_SECONDS).close()
    from qwen_edit_zero.cluster.process_group import connect  # imports torch, which took too long until now

    _Watch(connect(identity, serve=False, seconds=int(LOST_SECONDS)), failure.rank).tell(failure)


def _end_after_meeting(failure: Failure, watch: _Watch) -> NoReturn:
    watch.ending.set()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher must not cut the message short
    try:
        watch.tell(failure)
        found = watch.wait_for(_FIRST, GRACE_SECONDS)
        first = Failure(**found) if found else failure
        if failure.rank == 0:
            if first.text == failure.text:
                _say(failure.shown(alone=False))
            elif first.host != failure.host:
                _say(first.shown(alone=True))
            time.sleep(LINGER_SECONDS)
            _leave(first.status)
        if first.rank == failure.rank:
            also = watch.wait_for(f"{_BY}0", GRACE_SECONDS)
            if also is None or also["text"] != failure.text:
                _say(failure.shown(alone=True))
        else:
            time.sleep(2 * GRACE_SECONDS)  # let those speak who have to
        _leave(first.status)
    except Exception:  # the store does not answer: rank 0 is gone, and this failure is most likely its consequence
        _say(f"error on rank {failure.rank} ({failure.host}), and rank 0 does not answer: {failure.text}")
        _leave(failure.status)


def _say(text: str) -> None:
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _leave(status: int) -> NoReturn:
    """End this process now: neither finalisers nor threads nor collectives in flight may hold it."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    abort_if_initialised(status)
    os._exit(status)
