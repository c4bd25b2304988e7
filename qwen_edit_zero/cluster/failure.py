"""How a job ends when something is wrong: one clear message, one exit status, and no process left behind.

Before the ranks have met (see `process_group.start`), a mistake is nearly always every rank's mistake: rank 0 says it,
and the others say it only if nothing has ended them a few seconds later, nor rank 0 told them the same. Those that did
not fail hear of it where they would have met (`early_word.py`). Afterwards a failing rank leaves word in the
job's store; a thread of every other rank looks there and ends its process, even if it is inside a collective. Ranks
that cannot leave word (killed, frozen, on a node that was cut off) are missed by their pulse (`pulse.py`): the ranks
that look name them. Whoever hears nothing from the store itself ends by itself.

Exit status: 2 for what the user can mend (UserError), 130 for Ctrl-C, 75 if the same command is to be started again
(START_AGAIN), 128 + n for a second signal n, 1 for the rest.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import NoReturn

from qwen_edit_zero.cluster import early_word, last_words
from qwen_edit_zero.cluster.identity import Identity, discover, guess_ranks
from qwen_edit_zero.cluster.last_words import Failure, say
from qwen_edit_zero.cluster.pulse import BEAT_SECONDS, Seen, Store, position
from qwen_edit_zero.cluster.watch import (
    BY,
    FIRST,
    GRACE_SECONDS,
    LINGER_SECONDS,
    LOST_SECONDS,
    POLL_SECONDS,
    Watch,
    Word,
)
from qwen_edit_zero.cluster.watchdog import behind
from qwen_edit_zero.errors import START_AGAIN, QwenEditError

ENDING_SECONDS = 15.0  # that ending takes at most
MISSED_SECONDS = 2.5 * BEAT_SECONDS  # of silence by which the rank is known that ended while others waited for it
MPIRUN_SECONDS = 6.0  # in which Open MPI's mpirun, once a rank has failed, asks those on other nodes to end (after 3 s)
_PEER_GONE = ("Connection closed by peer", "Connection reset by peer", "Socket closed", "remote process exited")
_GONE = "another rank ended without a word (killed, or out of memory?); see its node's log"


_watch: Watch | None = None
_ending = threading.Event()
_asked = threading.Event()  # somebody asks this process to end while it is about to


def watch(store: Store, rank: int, world_size: int) -> None:
    """Begin to look for failures of other ranks in `store`, which must be this thread's own connection."""
    global _watch
    assert _watch is None, "watching already"
    _watch = Watch(store, rank, world_size, ends=_end_after_meeting, hangs=_end_alarmed)


def unwatch() -> None:
    """Stop looking: the job ends well."""
    global _watch
    if _watch is not None:
        _watch.stopped.set()
        for thread in _watch.threads:
            thread.join(2 * POLL_SECONDS)
        _watch.warden.close()
        _watch = None


def know_first_host(host: str) -> None:
    """Where rank 0 is, to name it when it has gone."""
    if _watch is not None:
        _watch.first_host = host


def expect_signs_within(seconds: float) -> None:
    """From now on a rank that gives no sign of life for so long ends the job."""
    if _watch is not None:
        _watch.silence = seconds


def whereabouts() -> list[Seen]:
    """Where all ranks were last seen; nothing on ranks that do not look, or before all have been."""
    if _watch is None:
        return []
    with _watch.lock:
        return _watch.pulse.everyone()


def is_ending() -> bool:
    """Whether this process is about to end, and settles with others what is said of it."""
    return _ending.is_set()


def asked_meanwhile() -> None:
    """A signal has asked this process to end while it was ending: before ranks have met, its launcher knows why."""
    _asked.set()


def alarm(text: str) -> None:
    """The job hangs: every rank writes down where it is (`LastWords.alarmed`), and the job ends with START_AGAIN."""
    if _watch is None:
        last_words.alarmed(text)
        _end_alarmed(text)
    with contextlib.suppress(Exception):  # the store is gone: this rank will be ended for that
        _watch.alarm(text)


def _end_alarmed(text: str) -> NoReturn:
    seen: list[Seen] = []
    if _watch is not None:
        with _watch.lock:
            seen = _watch.pulse.everyone()
    culprit, places = behind(seen)
    where = "; RUN/logs/hang-rank-*.txt say where each rank was" if last_words.are_expected() else ""
    told = f"; {places}" if _watch is not None else ""
    end_now(f"{text}: it hangs{told}{where}", START_AGAIN, asked=False, about=culprit)


def end_now(text: str, status: int, *, asked: bool = True, about: Seen | None = None) -> NoReturn:
    """End this process and all other ranks, from any thread. `about`: the rank whose failure it is."""
    _ending.set()
    rank = (guess_ranks()[0] or 0) if _watch is None else _watch.rank
    host = socket.gethostname()
    failure = Failure(rank, host, text, status, asked=asked)
    if about is not None:
        failure = replace(failure, rank=about.rank, host=about.host, by=rank, by_host=host)
    if _watch is not None:
        _end_after_meeting(failure)
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
    _ending.set()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    rank = (guess_ranks()[0] or 0) if _watch is None else _watch.rank
    failure = Failure(rank, socket.gethostname(), text, status, detail)
    last_words.own(failure)
    if _watch is not None:
        _end_after_meeting(failure)
    _end_before_meeting(failure)


def _end_before_meeting(failure: Failure) -> NoReturn:
    place = _meeting_place()
    if failure.rank == 0:
        say(failure.shown(alone=False))
        last_words.close(failure, speaks=True)
        if place is not None and not failure.asked:
            early_word.serve(failure, place.master_port, place.world_size - place.local_world_size)
        last_words.leave(failure.status)
    if failure.asked:
        last_words.leave(failure.status)  # by a launcher, perhaps, because another rank failed: that one tells why
    patience = GRACE_SECONDS * (1 if guess_ranks()[1] == 0 else 2)
    if _asked.wait(max(patience, MPIRUN_SECONDS) if "OMPI_COMM_WORLD_RANK" in os.environ else patience):
        last_words.leave(failure.status)  # the launcher ends this one, since another has failed, and told why
    is_there = True if place is None else _ask_rank_0(failure, place, GRACE_SECONDS)
    say(failure.shown(alone=True))
    if place is not None and not is_there and place.local_rank == 0:
        is_there = _ask_rank_0(failure, place, early_word.STAY_SECONDS)  # it may be the only one that has not failed
    if is_there:
        with contextlib.suppress(Exception):
            _tell_late(failure)
    last_words.leave(failure.status)


def _meeting_place() -> Identity | None:
    """This rank of a job over several nodes, where the launcher of one node may not know of a failure on another."""
    with contextlib.suppress(Exception):
        identity = discover()
        if identity.local_world_size < identity.world_size and identity.master_addr:
            return identity
    return None


def _ask_rank_0(failure: Failure, place: Identity, seconds: float) -> bool:
    """Whether somebody waits where the ranks meet; does not return if it is rank 0, to tell of this very failure."""
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError):
            found = early_word.ask(place.master_addr, place.master_port, place.rank)
            if found is not None and found["text"] == failure.text:
                last_words.leave(failure.status)
            return found is None
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)


def end_with_rank_0(found: dict[str, object]) -> None:
    """Rank 0 has failed before this rank has met it, and has said so."""
    if not _ending.is_set():
        status = found["status"]
        last_words.leave(status if isinstance(status, int) else 1)


def _tell_late(failure: Failure) -> None:
    """Leave word for ranks that wait for this one to meet them, if they do; they would wait for minutes."""
    identity = discover()
    if identity.world_size == 1 or not identity.master_addr:
        return
    socket.create_connection((identity.master_addr, identity.master_port), timeout=GRACE_SECONDS).close()
    from qwen_edit_zero.cluster.process_group import connect  # imports torch, which took too long until now

    Word(connect(identity, serve=False, seconds=int(LOST_SECONDS))).tell(failure)


def _end_after_meeting(failure: Failure) -> NoReturn:
    watch = _watch
    assert watch is not None
    _ending.set()
    if not watch.claim():  # another thread is ending this process, for this or for what led to it
        time.sleep(ENDING_SECONDS)
        last_words.leave(failure.status)
    watch.ending.set()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher must not cut the message short
    try:
        if failure.text == _GONE:
            failure = _named(failure, watch)
        watch.tell(failure)
        found = watch.wait_for(FIRST, GRACE_SECONDS)
        first = Failure(**found) if found else failure
        if watch.rank == 0:
            if first.text == failure.text:
                say(failure.shown(alone=False))
            elif first.by_host != watch.host:
                say(first.shown(alone=True))
            last_words.close(first, speaks=True)
            time.sleep(LINGER_SECONDS)
            last_words.leave(first.status)
        if first.by == watch.rank:
            also = watch.wait_for(f"{BY}0", GRACE_SECONDS)
            if also is None or also["text"] != failure.text:
                say(failure.shown(alone=True))
                last_words.close(first, speaks=also is None)
        else:
            time.sleep(2 * GRACE_SECONDS)  # let those speak who have to
        last_words.close(first, speaks=False)
        last_words.leave(first.status)
    except Exception:  # the store does not answer: rank 0 is gone, and this failure is most likely its consequence
        say(f"error on rank {watch.rank} ({watch.host}), and rank 0 does not answer: {failure.text}")
        last_words.close(replace(failure, rank=0, host=watch.first_host or "its host"), speaks=True)
        last_words.leave(failure.status)


def _named(failure: Failure, watch: Watch) -> Failure:
    """The failure of the rank that has ended without a word, once it has been missed."""
    deadline = time.monotonic() + 2 * MISSED_SECONDS
    while time.monotonic() < deadline and watch.ask(FIRST) is None:
        with watch.lock:
            silent = watch.pulse.silent(MISSED_SECONDS)
        if silent:
            text = f"it ended without a word (killed, or out of memory?), last: {silent[0].doing}; see its node's log"
            step = max(silent[0].step, position.step)  # its last sign may be a second old
            return Failure(silent[0].rank, silent[0].host, text, 1, by=watch.rank, by_host=watch.host, step=step)
        time.sleep(POLL_SECONDS)
    return failure
