"""Micro-batches of one rank, step after step, read and moved to the device by threads before they are asked for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count, islice, tee
from types import TracebackType
from typing import Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from qwen_edit_zero.edit_data.batches.batch import EditBatch, Entry, collate
from qwen_edit_zero.edit_data.batches.cost import SampleCosts
from qwen_edit_zero.edit_data.batches.device_copies import DeviceCopies
from qwen_edit_zero.edit_data.batches.schedule import SampleSchedule, StepPlan
from qwen_edit_zero.edit_data.batches.split import MicroBatch, StepShare, share_of_step

Key = TypeVar("Key")
_Key = TypeVar("_Key", contravariant=True)


class Entries(Protocol[_Key]):
    """Where what the encoders made of samples lies."""

    def get(self, key: _Key, /) -> Entry:
        """Read an entry; called by several threads at once. Raises DataError if it is gone or damaged."""
        ...


class Identified(Protocol):
    """A sample, as far as the loader cares."""

    @property
    def id(self) -> str:
        """Noise and sigma are drawn from it."""
        ...


class StepBatches:
    """The micro-batches of one step on one rank, to be gone through once; their number is the same on every rank.

    Attributes:
        imbalance: of the step over the ranks, see `StepShare`.
    """

    def __init__(self, size: int, take: Callable[[], EditBatch], *, imbalance: float = 0.0) -> None:
        self.imbalance = imbalance
        self._size = size
        self._left = size
        self._take = take

    def __len__(self) -> int:
        return self._size

    def __iter__(self) -> Iterator[EditBatch]:
        while self._left:
            self._left -= 1
            yield self._take()


class BatchLoader(Generic[Key]):
    """Reads ahead along the schedule, over the ends of steps and epochs. A context manager: leaving it ends threads.

        with BatchLoader(samples, entries, key_of, schedule, rank=rank, world_size=n, micro_size=1) as loader:
            for plan, batches in loader.steps(first, last):
                for batch in batches: ...

    Threads suffice: copying from a memory-mapped file, checksums and padding all release Python's lock.

    Args:
        samples: the samples that the schedule's indices mean.
        entries: where their latents and embeddings lie.
        key_of: key of what is read for a sample (its index) in an epoch, at a draw: which of its texts, which variant.
            Called by several threads at once.
        weights: (n,) factor of each sample's loss; None: 1, as where weights are repetition.
        costs: what samples cost, to divide steps evenly; None: all alike.
        prefetch: micro-batches read ahead; memory holds so many and the one in use.
        workers: threads that read, checksum and collate.
        device: where batches come; on a GPU through page-locked memory, copied beside computing. None: where they are.
    """

    def __init__(
        self,
        samples: Sequence[Identified],
        entries: Entries[Key],
        key_of: Callable[[int, int, int], Key],
        schedule: SampleSchedule,
        *,
        rank: int,
        world_size: int,
        micro_size: int,
        weights: npt.NDArray[np.floating] | None = None,
        costs: SampleCosts | None = None,
        prefetch: int = 4,
        workers: int = 2,
        device: torch.device | None = None,
    ) -> None:
        assert len(samples) == schedule.sample_count
        assert weights is None or len(weights) == len(samples)
        assert prefetch > 0
        self._samples = samples
        self._entries = entries
        self._key_of = key_of
        self._schedule = schedule
        self._rank = rank
        self._world_size = world_size
        self._micro_size = micro_size
        self._weights = weights
        self._costs = costs
        self._prefetch = prefetch
        self._copies = None if device is None or device.type != "cuda" else DeviceCopies(device)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="batches")

    def __enter__(self) -> BatchLoader[Key]:
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
        plans = map(self._schedule.step, count(first) if last is None else range(first, last))
        current, upcoming = tee((plan, self._share(plan)) for plan in plans)
        to_read = ((plan, micro) for plan, share in upcoming for micro in share.micro_batches)
        ahead: deque[Future[EditBatch]] = deque()

        def submit(most: int) -> None:
            ahead.extend(self._pool.submit(self._load, plan, micro) for plan, micro in islice(to_read, most))

        def take() -> EditBatch:
            batch = ahead.popleft().result()
            submit(1)
            if self._copies is not None:
                self._copies.await_arrival(batch)
            return batch

        submit(self._prefetch)
        for plan, share in current:
            batches = StepBatches(len(share.micro_batches), take, imbalance=share.imbalance)
            yield plan, batches
            assert not list(batches), f"step {plan.step} was left before all of its micro-batches were used"

    def _share(self, plan: StepPlan) -> StepShare:
        return share_of_step(
            plan, rank=self._rank, world_size=self._world_size, micro_size=self._micro_size, costs=self._costs
        )

    def _load(self, plan: StepPlan, micro: MicroBatch) -> EditBatch:
        keys = [self._key_of(i, plan.epoch, draw) for i, draw in zip(micro.indices, micro.draws, strict=True)]
        weights = [1.0 if self._weights is None else float(self._weights[i]) for i in micro.indices]
        batch = collate(
            [self._entries.get(key) for key in keys],
            weights=[0.0] * len(keys) if micro.filler else weights,
            sample_ids=[self._samples[i].id for i in micro.indices],
            epoch=plan.epoch,
            draws=micro.draws,
            filler=micro.filler,
        )
        return batch if self._copies is None else self._copies.start(batch)
