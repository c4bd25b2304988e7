"""Micro-batches of one rank, step after step, read from the cache by threads before they are asked for."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice
from types import TracebackType

from qwen_edit_zero.edit_data.batches.batch import EditBatch, collate
from qwen_edit_zero.edit_data.batches.schedule import MicroBatch, SampleSchedule, StepPlan, micro_batches
from qwen_edit_zero.edit_data.cache.store import ConditioningCache
from qwen_edit_zero.edit_data.manifests.manifest import Sample


class StepBatches:
    """The micro-batches of one step on one rank, to be gone through once; their number is the same on every rank."""

    def __init__(self, size: int, take: Callable[[], EditBatch]) -> None:
        self._size = size
        self._left = size
        self._take = take

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[EditBatch]:
        while self._left:
            self._left -= 1
            yield self._take()


class BatchLoader:
    """Reads ahead along the schedule. A context manager: leaving it ends the threads.

        with BatchLoader(samples, keys, cache, schedule, rank=rank, world_size=n, micro_size=1) as loader:
            for plan, batches in loader.steps(first, last):
                for batch in batches: ...

    Args:
        samples: the samples that the schedule's indices mean.
        keys: cache key of each of them.
        prefetch: micro-batches read ahead; memory holds so many and the one in use.
        threads: that read and checksum entries.
        pin_memory: batches come in page-locked memory, for copies that overlap with computing. Needs CUDA.

    Attributes:
        wait_seconds: time callers have waited for batches since the loader was made.
    """

    def __init__(
        self,
        samples: Sequence[Sample],
        keys: Sequence[str],
        cache: ConditioningCache,
        schedule: SampleSchedule,
        *,
        rank: int,
        world_size: int,
        micro_size: int,
        prefetch: int = 4,
        threads: int = 2,
        pin_memory: bool = False,
    ) -> None:
        assert len(samples) == len(keys) == schedule.sample_count
        assert prefetch > 0
        self.wait_seconds = 0.0
        self._samples = samples
        self._keys = keys
        self._cache = cache
        self._schedule = schedule
        self._rank = rank
        self._world_size = world_size
        self._micro_size = micro_size
        self._prefetch = prefetch
        self._pin = pin_memory
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="batches")

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Forget what was read ahead and end the threads."""
        self._pool.shutdown(cancel_futures=True)

    def steps(self, first: int, last: int | None = None) -> Iterator[tuple[StepPlan, StepBatches]]:
        """Steps `first` up to, not including, `last` (None: without end), each with this rank's micro-batches.

        A step's micro-batches are to be used up before the next step is asked for.

        Raises:
            DataError: a cache entry is gone or damaged; raised where its batch would have come.
        """

        def plans() -> Iterable[StepPlan]:
            return map(self._schedule.step, count(first) if last is None else range(first, last))

        upcoming = ((plan, micro) for plan in plans() for micro in self._share(plan))
        ahead: deque[Future[EditBatch]] = deque()

        def submit(most: int) -> None:
            ahead.extend(self._pool.submit(self._load, plan, micro) for plan, micro in islice(upcoming, most))

        def take() -> EditBatch:
            started = time.perf_counter()
            batch = ahead.popleft().result()
            submit(1)
            self.wait_seconds += time.perf_counter() - started
            return batch

        submit(self._prefetch)
        for plan in plans():
            batches = StepBatches(len(self._share(plan)), take)
            yield plan, batches
            assert not list(batches), f"step {plan.step} was left before all of its micro-batches were used"

    def _share(self, plan: StepPlan) -> list[MicroBatch]:
        return micro_batches(plan, rank=self._rank, world_size=self._world_size, micro_size=self._micro_size)

    def _load(self, plan: StepPlan, micro: MicroBatch) -> EditBatch:
        samples = [self._samples[i] for i in micro.indices]
        batch = collate(
            [self._cache.get(self._keys[i]) for i in micro.indices],
            weights=[0.0 if micro.filler else sample.weight for sample in samples],
            sample_ids=[sample.id for sample in samples],
            epoch=plan.epoch,
        )
        return batch.pin_memory() if self._pin else batch
