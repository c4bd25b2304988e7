"""Which samples each optimizer step trains on, and how they fall to ranks and micro-batches: pure functions.

An epoch's steps are a function of (seed, epoch, global batch size, buckets). The samples of every bucket are shuffled
and cut into steps of the global batch size, what is left over making one shorter step; then the steps of all buckets
are shuffled together. So every epoch holds each sample exactly once, every step is drawn from one bucket, and the
number of steps an epoch is constant. Nothing here depends on ranks, so runs of any size train on the same steps.

The shuffle sorts by a 64-bit hash instead of using a library's generator, whose stream may change between versions: a
run goes on in the same order after an upgrade.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

_U64 = npt.NDArray[np.uint64]
_SAMPLES, _STEPS = 1, 2  # what is shuffled


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step: `indices` are positions in the list of samples, all of one bucket.

    `step` and `epoch` count from 0.
    """

    step: int
    epoch: int
    indices: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples of one forward of one rank. A filler repeats a real sample and must weigh nothing."""

    indices: tuple[int, ...]
    filler: bool = False


class SampleSchedule:
    """The samples of every optimizer step, forever; it holds no position.

    Args:
        buckets: bucket of each sample, in the samples' order. Only which of them are equal matters.
        seed: of the run.
        global_size: samples of a full step over all ranks.
    """

    def __init__(self, buckets: Sequence[Hashable], *, seed: int, global_size: int) -> None:
        assert len(buckets) > 0, "a schedule needs samples; the readers refuse empty data sets"
        assert global_size > 0
        number: dict[Hashable, int] = {}
        self._bucket = np.fromiter((number.setdefault(b, len(number)) for b in buckets), np.int64, len(buckets))
        self._seed = seed
        starts, ends, offset = [], [], 0
        for count in np.bincount(self._bucket).tolist():
            cuts = list(range(offset, offset + count, global_size))
            starts += cuts
            ends += [*cuts[1:], offset + count]
            offset += count
        self._starts = np.asarray(starts, np.int64)
        self._ends = np.asarray(ends, np.int64)
        self._epochs: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}

    @property
    def sample_count(self) -> int:
        """Number of samples of an epoch."""
        return len(self._bucket)

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of an epoch: for each bucket its samples divided by the global batch size, rounded up."""
        return len(self._starts)

    def step(self, global_step: int) -> StepPlan:
        """The samples of optimizer step `global_step`, counted from 0 over all epochs."""
        epoch, position = divmod(global_step, self.steps_per_epoch)
        samples, steps = self._epoch(epoch)
        at = steps[position]
        return StepPlan(global_step, epoch, tuple(samples[self._starts[at] : self._ends[at]].tolist()))

    def samples_before(self, global_step: int) -> int:
        """Number of samples that the steps before `global_step` hold together."""
        epoch, position = divmod(global_step, self.steps_per_epoch)
        _, steps = self._epoch(epoch)
        done = steps[:position]
        return epoch * self.sample_count + int((self._ends[done] - self._starts[done]).sum())

    def _epoch(self, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Samples sorted by bucket and shuffled inside each, and the shuffled order of the steps."""
        if epoch not in self._epochs:
            if len(self._epochs) == 2:  # a reader ahead may be in the next epoch already
                del self._epochs[next(iter(self._epochs))]
            samples = np.lexsort((_hashes(self._seed, epoch, _SAMPLES, self.sample_count), self._bucket))
            steps = np.argsort(_hashes(self._seed, epoch, _STEPS, self.steps_per_epoch), kind="stable")
            self._epochs[epoch] = (samples, steps)
        return self._epochs[epoch]


def micro_batches(plan: StepPlan, *, rank: int, world_size: int, micro_size: int) -> list[MicroBatch]:
    """What one rank computes of a step: the same number of micro-batches on every rank.

    Shares of ranks differ by one sample at most, and so do the micro-batches of a rank. A rank that has fewer samples
    than there are micro-batches runs fillers, because sharded engines need as many forwards on every rank.
    """
    assert 0 <= rank < world_size
    assert micro_size > 0
    total = len(plan.indices)
    first, last = _share(total, rank, world_size)
    count = -(-_share(total, 0, world_size)[1] // micro_size)  # rank 0 has a largest share
    real = min(count, last - first)
    batches = []
    for i in range(real):
        start, end = _share(last - first, i, real)
        batches.append(MicroBatch(plan.indices[first + start : first + end]))
    filler = MicroBatch(plan.indices[:1], filler=True)
    return batches + [filler] * (count - real)


def _share(total: int, part: int, parts: int) -> tuple[int, int]:
    """Start and end of one of `parts` contiguous shares of `total`; the first ones are larger by one where uneven."""
    base, extra = divmod(total, parts)
    start = part * base + min(part, extra)
    return start, start + base + (part < extra)


def _hashes(seed: int, epoch: int, purpose: int, count: int) -> _U64:
    """`count` 64-bit hashes of (seed, epoch, purpose, index): SplitMix64's finaliser over its golden-ratio sequence."""
    state = np.zeros(1, np.uint64)
    for word in (seed & (2**64 - 1), epoch, purpose):
        state = _mix(state ^ np.uint64(word))
    sequence = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    return _mix(state + sequence)


def _mix(x: _U64) -> _U64:
    """SplitMix64's finaliser (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
