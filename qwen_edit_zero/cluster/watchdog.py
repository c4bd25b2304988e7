"""Notices that a step takes far longer than steps do, on any rank, and has the job end (see `failure.alarm`).

Only the step itself is timed: waiting for data, computing, collectives. What happens between steps (checkpoints,
pictures) takes as long as it takes.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence

from qwen_edit_zero.cluster.pulse import Position, Seen, position

_REMEMBERED = 101  # steps of which the median is the usual
_ENOUGH = 5  # steps by which the usual is known; the first of them compile and warm up


class Watchdog:
    """A thread that times steps, and calls `alarm` once, with words, when one takes too long. A context manager.

    A step may take `factor` times the median of the last hundred, and `extra_seconds` more; before that is known,
    `first_seconds`. Time in which this process did not run at all (a suspended job) does not count.
    """

    def __init__(
        self,
        alarm: Callable[[str], None],
        *,
        factor: float,
        extra_seconds: float,
        first_seconds: float,
        place: Position = position,
    ) -> None:
        self._alarm = alarm
        self._factor, self._extra, self._first, self._place = factor, extra_seconds, first_seconds, place
        self._usual: deque[float] = deque(maxlen=_REMEMBERED)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def stepped(self, seconds: float) -> None:
        """A step has taken so long."""
        self._usual.append(seconds)

    def limit(self) -> float:
        """Seconds that a step may take now."""
        if len(self._usual) < _ENOUGH:
            return self._first
        return self._factor * statistics.median(self._usual) + self._extra

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._stopped.set()

    def _watch(self) -> None:
        timed, taken, last = self._place.step_began, 0.0, time.monotonic()
        while not self._stopped.wait(min(1.0, self._extra / 4)):
            now = time.monotonic()
            if self._place.step_began != timed:
                timed, taken = self._place.step_began, 0.0
            elif timed is not None:
                taken += min(now - last, 3.0)
            last = now
            if timed is not None and taken > self.limit():
                self._alarm(self._words(taken))
                return

    def _words(self, taken: float) -> str:
        if len(self._usual) < _ENOUGH:
            return f"step {self._place.step} has not ended after {taken:.0f} s"
        usual = statistics.median(self._usual)
        return f"step {self._place.step} has not ended after {taken:.0f} s, and {usual:.3g} s are usual"


def behind(everyone: Sequence[Seen]) -> tuple[Seen | None, str]:
    """Which rank is behind the others, if one alone is, and where ranks are, in words."""
    if not everyone:
        return None, "where the other ranks are is not known"
    first = min((seen.step, seen.count) for seen in everyone)
    last = [seen for seen in everyone if (seen.step, seen.count) == first]
    if len(last) == len(everyone):
        return None, f"all ranks are at the same place: {last[0].doing}"
    rest = Counter(f"step {seen.step}, {seen.doing}" for seen in everyone if seen not in last)
    (place, _), more = rest.most_common(1)[0], len(rest) - 1
    others = f"the others: {place}" + (f" and {more} other places" if more else "")
    named = "; ".join(str(seen) for seen in last[:4]) + (f" and {len(last) - 4} more" if len(last) > 4 else "")
    return (last[0] if len(last) == 1 else None), f"behind: {named}; {others}"
