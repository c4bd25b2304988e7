"""What ZeRO-3 gathers and keeps gathered: DeepSpeed's prefetching and releasing, played through for one micro-batch.

The rules are those of DeepSpeed 0.19.8's PartitionedParameterCoordinator once it has recorded a pass:

- before a layer is used, what it lacks is gathered, and then what comes next, up to `stage3_prefetch_bucket_size`
  elements, while fewer than `stage3_max_live_parameters` are there;
- after it, its parameters are released, unless they are used again within `stage3_max_reuse_distance` elements, or
  have been passed over by the prefetching because they were there.

Several parameters that are gathered together arrive in one buffer and are copied out of it; the buffer stays until the
last of them is used.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from qwen_edit_zero.planning.engines.layout import persistent, slice_part
from qwen_edit_zero.planning.engines.modules import Use, passes
from qwen_edit_zero.planning.jobs.deepspeed import ZeroOptions
from qwen_edit_zero.planning.jobs.job import Job
from qwen_edit_zero.planning.jobs.model import TransformerShape
from qwen_edit_zero.planning.jobs.trainable import split
from qwen_edit_zero.settings.models import ModelSettings

_NEVER = -(10**10)


@dataclass(frozen=True)
class Gathering:
    """Of one micro-batch, in elements; what is always gathered is not in it.

    Attributes:
        forward, backward: elements gathered by all-gathers in each pass, padding included.
        forward_peak, backward_peak: most elements of memory that gathered parameters take in each.
    """

    forward: int
    backward: int
    forward_peak: int
    backward_peak: int


def gathering(job: Job) -> Gathering:
    """Of a job under ZeRO-3."""
    assert job.zero is not None
    # Without padding the number of ranks makes no difference.
    is_even = job.world > 1 and all(p.elements % job.world == 0 for p in job.trained + job.frozen)
    world = 2 if is_even else job.world
    return _gathering(job.model, job.settings.model, job.zero, world, job.accumulation > 1)


@functools.lru_cache(maxsize=64)
def _gathering(
    model: TransformerShape, settings: ModelSettings, zero: ZeroOptions, world: int, accumulates: bool
) -> Gathering:
    if world == 1:
        return Gathering(0, 0, 0, 0)  # parameters are used where they lie
    coordinator = _Coordinator(model, settings, zero, world)
    if accumulates:
        # What is released where is remembered from the first pass after the recorded one. Within the first step,
        # parameters that are to stay gathered were not there yet.
        first = _Coordinator(model, settings, zero, world, without_persistent=True)
        first.run()
        coordinator.remembered = first.remembered
    coordinator.run()
    gathered, peaks = coordinator.gathered, coordinator.peaks
    return Gathering(gathered[False], gathered[True], peaks[False], peaks[True])


@dataclass
class _Arrival:
    """Parameters that were gathered together; `waiting` have not been asked for yet."""

    places: list[int]
    waiting: int
    has_come: bool = False


class _Coordinator:
    def __init__(
        self,
        model: TransformerShape,
        settings: ModelSettings,
        zero: ZeroOptions,
        world: int,
        *,
        without_persistent: bool = False,
    ) -> None:
        self._max_live, self._prefetch, self._reuse = zero.max_live, zero.prefetch_bucket, zero.max_reuse_distance
        trained, frozen = split(model, settings)
        parameters = trained + frozen
        self._sizes = [p.elements for p in parameters]
        self._padded = [slice_part(p, world) * world for p in parameters]
        kept = {p.name for p in persistent(parameters, zero)}
        self._persistent = {place for place, p in enumerate(parameters) if p.name in kept}
        self._uses = passes(model, settings)
        self._queue = deque((place, step) for step, use in enumerate(self._uses) for place in sorted(use.parameters))
        self._fetched_for = [_NEVER] * len(parameters)
        self._there = set() if without_persistent else set(self._persistent)
        self.remembered: dict[int, set[int]] = {}  # what is released after each use
        self._arrivals: dict[int, _Arrival] = {}  # by parameter, until it is asked for
        self._live = 0  # elements that count against max_live
        self._memory = 0
        self.gathered = {False: 0, True: 0}
        self.peaks = {False: 0, True: 0}

    def run(self) -> None:
        for step, use in enumerate(self._uses):
            self._fetch(step, use)
            self._release(step + 1, use)

    def _fetch(self, step: int, use: Use) -> None:
        self._gather([p for p in use.parameters if self._is_away(p)], use.backward)
        for place in use.parameters:
            self._wait(place, use.backward)
        fresh = {p for p in use.parameters if self._fetched_for[p] < step}
        passed: set[int] = set()
        while self._queue and len(passed) < len(fresh):
            place, last = self._queue.popleft()
            self._fetched_for[place] = last
            passed.add(place)
        self._look_ahead(use)

    def _look_ahead(self, use: Use) -> None:
        most = min(self._max_live - self._live, self._prefetch)
        ahead: list[int] = []
        elements = 0
        while self._queue and elements < most:
            place, step = self._queue.popleft()
            if self._is_away(place) and place not in ahead:
                ahead.append(place)
                elements += self._sizes[place]
            self._fetched_for[place] = max(self._fetched_for[place], step)
        self._gather(ahead, use.backward)

    def _is_away(self, place: int) -> bool:
        return place not in self._there and place not in self._arrivals

    def _gather(self, places: Iterable[int], backward: bool) -> None:
        arrival = _Arrival(list(places), 0)
        arrival.waiting = len(arrival.places)
        for place in arrival.places:
            self._arrivals[place] = arrival
            self._live += self._sizes[place]
        size = sum(self._padded[place] for place in arrival.places)
        self.gathered[backward] += size
        self._take(size, backward)

    def _wait(self, place: int, backward: bool) -> None:
        arrival = self._arrivals.pop(place, None)
        if arrival is None:
            return
        arrival.waiting -= 1
        alone = len(arrival.places) == 1
        if not arrival.has_come:
            arrival.has_come = True
            self._there.update(arrival.places)
            if not alone:  # all are copied out of the buffer
                self._take(sum(self._sizes[other] for other in arrival.places), backward)
        if arrival.waiting == 0 and not alone:
            self._memory -= sum(self._padded[other] for other in arrival.places)
        elif alone:  # the parameter is a view of it; what is released counts without padding
            self._memory -= self._padded[place] - self._sizes[place]

    def _take(self, size: int, backward: bool) -> None:
        self._memory += size
        self.peaks[backward] = max(self.peaks[backward], self._memory)

    def _release(self, step: int, use: Use) -> None:
        if step not in self.remembered:
            self.remembered[step] = self._to_release(step, use)
        for place in self.remembered[step] & self._there:
            self._there.discard(place)
            self._live -= self._sizes[place]
            self._memory -= self._sizes[place]

    def _to_release(self, step: int, use: Use) -> set[int]:
        leaving = {p for p in use.parameters if p not in self._persistent and self._fetched_for[p] <= step}
        traversed = 0
        for later in self._uses[step:]:
            if traversed >= self._reuse or not leaving:
                break
            leaving.difference_update(later.parameters)
            traversed += sum(self._sizes[place] for place in later.parameters)
        return leaving
