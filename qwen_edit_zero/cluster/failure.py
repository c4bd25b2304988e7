"""How a job ends when something is wrong: one clear message, one exit status, and no process left behind.

Before the ranks have met (see `process_group.start`), a mistake is nearly always every rank's mistake: rank 0 says it,
and the others say it only if nothing has ended them a few seconds later. Afterwards a failing rank leaves word in the
job's store; a thread of every other rank looks there and ends its process, even if it is inside a collective. Ranks
that cannot leave word (killed, frozen, on a node that was cut off) are missed by their pulse (`pulse.py`): the ranks
that look name them. Whoever hears nothing from the store itself ends by itself.

Exit status: 2 for what the user can mend (UserError), 130 for Ctrl-C, 75 if the same command is to be started again
(START_AGAIN), 128 + n for a second signal n, 1 for the rest.
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
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NoReturn

from qwen_edit_zero.cluster.identity import discover, guess_ranks
from qwen_edit_zero.cluster.mpi import abort_if_initialised
from qwen_edit_zero.cluster.pulse import BEAT_SECONDS, SETUP_SECONDS, Pulse, Seen, Store, position
from qwen_edit_zero.errors import START_AGAIN, QwenEditError

POLL_SECONDS = 0.5
GRACE_SECONDS = 2.0  # in which ranks that fail for the same reason find out that they do
LINGER_SECONDS = 2.5  # how long rank 0, which serves the store, waits for the others to have looked
LOST_SECONDS = 5.0  # after which a store that refuses to answer is gone
MISSED_SECONDS = 2.5 * BEAT_SECONDS  # of silence by which the rank is known that ended while others waited for it
ALARM_SECONDS = 5.0  # for writing down stacks
FAREWELL_SECONDS = 3.0  # for the last words into files, whose disk may have gone
_PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Socket closed", "remote process exited")
_GONE = "another rank ended without a word (killed, or out of memory?); see its node's log"
_FIRST, _COUNT, _BY, _ALARM = "failure/first", "failure/count", "failure/by/", "failure/alarm"


@dataclass(frozen=True)
class Failure:
    """Why a job ends. Two ranks with the same `text` fail alike.

    Attributes:
        rank, host: whose failure it is.
        text: the cause, in words.
        status: exit status.
        detail: a traceback, shown before the text.
        asked: it is no error: a signal asked for it.
        by, by_host: who tells of it, where that is another rank.
        step: the step under way; 0: none yet.
    """

    rank: int
    host: str
    text: str
    status: int
    detail: str = ""
    asked: bool = False
    by: int = -1
    by_host: str = ""
    step: int = field(default_factory=lambda: position.step)

    def __post_init__(self) -> None:
        if self.by < 0:
            object.__setattr__(self, "by", self.rank)
            object.__setattr__(self, "by_host", self.host)

    def shown(self, *, alone: bool) -> str:
        """What the user sees; `alone` if this is not rank 0 speaking for all."""
        step = f" at step {self.step}" if self.step else ""
        where = f" on rank {self.rank} ({self.host}){step}" if alone or self.by != self.rank else ""
        if self.asked or self.status == 130:
            return f"{self.text}{where}"
        return f"{self.detail}error{where}: {self.text}"


@dataclass(frozen=True)
class LastWords:
    """What a run does at the end of its processes; called once, in any thread, and not waited for long.

    Attributes:
        own: this rank's own failure, for its log.
        job: why the job ends; returns the last line for the user, which one rank prints.
        alarmed: somebody asks all ranks to write down where they are, and says why.
    """

    own: Callable[[Failure], None]
    job: Callable[[Failure], str]
    alarmed: Callable[[str], None]


class _Word:
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
            self.store.set(f"{_BY}{failure.by}", record)
            if self.store.add(_COUNT, 1) == 1:
                self.store.set(_FIRST, record)

    def wait_for(self, key: str, seconds: float) -> dict[str, Any] | None:
        deadline = time.monotonic() + seconds
        while (found := self.ask(key)) is None and time.monotonic() < deadline:
            time.sleep(0.1)
        return found


class _Watch(_Word):
    """This rank's eyes on the others, and its pulse."""

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        super().__init__(store)
        self.rank, self.host = rank, socket.gethostname()
        self.stopped = threading.Event()
        self.ending = threading.Event()
        self.silence = SETUP_SECONDS
        # After an alarm every rank writes down where it is; then one that knows of all ends the job, if it can.
        self.patience = ALARM_SECONDS * (1 if rank == 0 else 2 if rank == world_size - 1 else 3)
        self.answered = time.monotonic()
        self.pulse = Pulse(store, rank, world_size)
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
                found = self.ask(_FIRST)
                if found is None:
                    with self.lock:
                        self.pulse.turn()
                        silent = self.pulse.silent(self.silence)
                    if alarm is None and (alarm := self.ask(_ALARM)) is not None:
                        alarmed = time.monotonic()
                        _write_where(alarm["text"])
            except Exception:  # whatever the store's client raises: it does not answer
                if self.stopped.wait(LOST_SECONDS) or self.ending.is_set():
                    return  # rank 0 had ended well, or this rank has noticed by itself
                self.lost("has probably ended: its store refuses to answer")
            self.answered = time.monotonic()
            if silent and not self.ending.is_set():
                self._end_for(silent)
            if alarm is not None and time.monotonic() - alarmed > self.patience and not self.ending.is_set():
                _end_alarmed(alarm["text"])
            if found is None:
                continue
            self.ending.wait(GRACE_SECONDS)  # this rank may be failing too, and then settles who speaks
            if self.ending.is_set() or self.stopped.is_set():
                return
            self._end_with(Failure(**found))

    def guard(self) -> None:
        """End this process when the store says nothing, not even that it is gone."""
        looked = time.monotonic()
        while not self.stopped.wait(1.0):
            now = time.monotonic()
            if now - looked > LOST_SECONDS:
                self.answered = now  # this process itself was stopped, perhaps all of them
            looked = now
            if now - self.answered > self.silence:
                self.lost(f"has not answered for {self.silence:.0f} s: it is frozen, or its node is cut off")

    def lost(self, how: str) -> NoReturn:
        """Rank 0 is gone, and so is the way to tell anybody."""
        failure = Failure(0, _first_host or "its host", how, 1, by=self.rank, by_host=self.host)
        _say(f"error on rank {self.rank} ({self.host}): lost contact with rank 0 ({failure.host}), which {how}")
        _close(failure, speaks=True)
        _leave(1)

    def _end_with(self, first: Failure) -> NoReturn:
        if self.rank == 0 and first.by_host != self.host:
            _say(first.shown(alone=True))
        _close(first, speaks=self.rank == 0)
        if self.rank == 0:
            time.sleep(LINGER_SECONDS)
        _leave(first.status)

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
        _end_after_meeting(failure, self)


def _kill_brother(seen: Seen, host: str) -> None:
    """End a frozen process of the same launcher on this node, for which the launcher would wait."""
    if seen.host != host:
        return
    with contextlib.suppress(OSError, ValueError, IndexError):
        with open(f"/proc/{seen.process}/stat", encoding="utf-8") as file:
            parent = int(file.read().rpartition(")")[2].split()[1])
        if parent == os.getppid() != 1:
            os.kill(seen.process, signal.SIGKILL)


_watch: _Watch | None = None
_first_host = ""
_last_words: LastWords | None = None


def watch(store: Store, rank: int, world_size: int) -> None:
    """Begin to look for failures of other ranks in `store`, which must be this thread's own connection."""
    global _watch
    assert _watch is None, "watching already"
    _watch = _Watch(store, rank, world_size)


def unwatch() -> None:
    """Stop looking: the job ends well."""
    global _watch
    if _watch is not None:
        _watch.stopped.set()
        for thread in _watch.threads:
            thread.join(2 * POLL_SECONDS)
        _watch = None


def know_first_host(host: str) -> None:
    """Where rank 0 is, to name it when it has gone."""
    global _first_host
    _first_host = host


def expect_signs_within(seconds: float) -> None:
    """From now on a rank that gives no sign of life for so long ends the job."""
    if _watch is not None:
        _watch.silence = seconds


def at_end(words: LastWords | None) -> None:
    """What is to be done when processes end other than by returning from `main`; None: nothing any more."""
    global _last_words
    _last_words = words


def alarm(text: str) -> None:
    """The job hangs: every rank writes down where it is (`LastWords.alarmed`), and the job ends with START_AGAIN."""
    if _watch is None:
        _write_where(text)
        _end_alarmed(text)
    with contextlib.suppress(Exception), _watch.lock:
        _watch.store.set(_ALARM, json.dumps({"text": text}))


def _write_where(text: str) -> None:
    _say_last_words(lambda words: words.alarmed(text))


def _end_alarmed(text: str) -> NoReturn:
    from qwen_edit_zero.cluster.watchdog import behind

    seen: list[Seen] = []
    if _watch is not None:
        with _watch.lock:
            seen = _watch.pulse.everyone()
    culprit, places = behind(seen)
    where = "; RUN/logs/hang-rank-*.txt say where each rank was" if _last_words is not None else ""
    told = f"; {places}" if _watch is not None else ""
    end_now(f"{text}: it hangs{told}{where}", START_AGAIN, asked=False, about=culprit)


def end_now(text: str, status: int, *, asked: bool = True, about: Seen | None = None) -> NoReturn:
    """End this process and all other ranks, from any thread. `about`: the rank whose failure it is."""
    rank = (guess_ranks()[0] or 0) if _watch is None else _watch.rank
    host = socket.gethostname()
    failure = Failure(rank, host, text, status, asked=asked)
    if about is not None:
        failure = replace(failure, rank=about.rank, host=about.host, by=rank, by_host=host)
    if _watch is not None:
        _end_after_meeting(failure, _watch)
    _end_before_meeting(failure)


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
        return _GONE, 1, ""
    return f"{type(error).__name__}: {error}", 1, "".join(traceback.format_exception(error)[:-1])


def _end(text: str, status: int, detail: str) -> NoReturn:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank = (guess_ranks()[0] or 0) if _watch is None else _watch.rank
    failure = Failure(rank, socket.gethostname(), text, status, detail)
    _say_last_words(lambda words: words.own(failure))
    if _watch is not None:
        _end_after_meeting(failure, _watch)
    _end_before_meeting(failure)


def _end_before_meeting(failure: Failure) -> NoReturn:
    if failure.rank == 0:
        _say(failure.shown(alone=False))
        _close(failure, speaks=True)
        _leave(failure.status)
    time.sleep(GRACE_SECONDS if guess_ranks()[1] == 0 else 2 * GRACE_SECONDS)  # the launcher ends this one meanwhile
    _say(failure.shown(alone=True))
    with contextlib.suppress(Exception):
        _tell_late(failure)
    _leave(failure.status)


def _tell_late(failure: Failure) -> None:
    """Leave word for ranks that wait for this one to meet them, if they do; they would wait for minutes."""
    identity = discover()
    if identity.world_size == 1 or not identity.master_addr:
        return
    socket.create_connection((identity.master_addr, identity.master_port), timeout=GRACE_SECONDS).close()
    from qwen_edit_zero.cluster.process_group import connect  # imports torch, which took too long until now

    _Word(connect(identity, serve=False, seconds=int(LOST_SECONDS))).tell(failure)


def _end_after_meeting(failure: Failure, watch: _Watch) -> NoReturn:
    watch.ending.set()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher must not cut the message short
    try:
        if failure.text == _GONE:
            failure = _named(failure, watch)
        watch.tell(failure)
        found = watch.wait_for(_FIRST, GRACE_SECONDS)
        first = Failure(**found) if found else failure
        if watch.rank == 0:
            if first.text == failure.text:
                _say(failure.shown(alone=False))
            elif first.by_host != watch.host:
                _say(first.shown(alone=True))
            _close(first, speaks=True)
            time.sleep(LINGER_SECONDS)
            _leave(first.status)
        if first.by == watch.rank:
            also = watch.wait_for(f"{_BY}0", GRACE_SECONDS)
            if also is None or also["text"] != failure.text:
                _say(failure.shown(alone=True))
                _close(first, speaks=also is None)
        else:
            time.sleep(2 * GRACE_SECONDS)  # let those speak who have to
        _close(first, speaks=False)
        _leave(first.status)
    except Exception:  # the store does not answer: rank 0 is gone, and this failure is most likely its consequence
        _say(f"error on rank {watch.rank} ({watch.host}), and rank 0 does not answer: {failure.text}")
        _close(replace(failure, rank=0, host=_first_host or "its host"), speaks=True)
        _leave(failure.status)


def _named(failure: Failure, watch: _Watch) -> Failure:
    """The failure of the rank that has ended without a word, once it has been missed."""
    deadline = time.monotonic() + 2 * MISSED_SECONDS
    while time.monotonic() < deadline and watch.ask(_FIRST) is None:
        with watch.lock:
            silent = watch.pulse.silent(MISSED_SECONDS)
        if silent:
            text = f"it ended without a word (killed, or out of memory?), last: {silent[0].doing}; see its node's log"
            step = silent[0].step
            return Failure(silent[0].rank, silent[0].host, text, 1, by=watch.rank, by_host=watch.host, step=step)
        time.sleep(POLL_SECONDS)
    return failure


def _close(failure: Failure, *, speaks: bool) -> None:
    """The run's own last words, once; the last line of all where this rank speaks."""
    line: list[str] = []
    _say_last_words(lambda words: line.append(words.job(failure)))
    if speaks and line:
        _say(line[0])


def _say_last_words(say: Callable[[LastWords], None]) -> None:
    """In a thread, since files may lie on a disk that does not answer any more."""
    words = _last_words
    if words is None:
        return

    def run() -> None:
        with contextlib.suppress(Exception):
            say(words)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(FAREWELL_SECONDS)


def _say(text: str) -> None:
    """On the terminal only: a rank's log gets `LastWords`, whether the rank speaks or not."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        stream = getattr(sys.stderr, "terminal", sys.stderr)
        stream.write(f"{text}\n")
        stream.flush()


def _leave(status: int) -> NoReturn:
    """End this process now: neither finalisers nor threads nor collectives in flight may hold it."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    abort_if_initialised(status)
    os._exit(status)
