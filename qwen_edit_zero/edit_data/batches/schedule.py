"""Which samples each optimizer step trains on: a pure function that is computed where it is asked for.

A step's samples are a function of (seed, epoch, position of the step, global batch size, buckets, and how often samples
come) alone; nothing depends on ranks, and nothing is remembered. The rule:

- Samples of one bucket that come equally often (`Repeats`) form a *cell*. A cell's samples stand in a circle, shuffled
  once by the seed, and every epoch draws the next ones of the circle: with m samples that come r times an epoch,
  floor(r m (e + 1) + p) - floor(r m e + p) of them in epoch e, where p is a constant of the cell. So after E epochs a
  sample has come r E times, to within less than one, and for r = 1 / 3 each comes once in any three epochs.
- An epoch's draws of each bucket are shuffled and cut into steps of the global batch size; what is left over makes one
  shorter step. The steps of all buckets are then shuffled together.

Where every sample comes once (no `Repeats`) that says: every epoch holds each sample exactly once, and has the same
number of steps. Otherwise the number of draws an epoch is that of the samples on average; with several cells whose r m
are no whole numbers, it and the number of steps vary by a few between epochs.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.edit_data.batches.repeats import Repeats
from qwen_edit_zero.edit_data.batches.shuffle import Keys, Longs, key, positions_of, shuffled

RULE = "circles in shuffled buckets, 2"  # changes when another version would draw other samples at the same step
_CIRCLE, _DRAWS, _STEPS = 1, 2, 3  # what is shuffled
_MORE_STEPS, _IN_SHORT_STEPS = 1.2, 0.1  # from which on it is worth knowing
_UNIT = 20  # binary places of a cell's draws an epoch: whole numbers count exactly, for any number of epochs


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One optimizer step.

    Attributes:
        step: number of the step, from 0.
        epoch: from 0.
        indices: positions in the list of samples, all of one bucket.
        draws: how often each of them came before in this epoch, which is 0 unless samples are repeated; empty: all 0.
    """

    step: int
    epoch: int
    indices: tuple[int, ...]
    draws: tuple[int, ...] = ()


@dataclass(frozen=True)
class Filling:
    """How full an epoch's steps are.

    Attributes:
        steps: of the epoch; fewest: that its draws would need if they were all of one bucket.
        draws: of the epoch; short_draws: of them, in steps of fewer samples than the global batch.
        short_steps: at most one a bucket.
        buckets: that are drawn from.
    """

    steps: int
    fewest: int
    draws: int
    short_steps: int
    short_draws: int
    buckets: int

    @property
    def is_poor(self) -> bool:
        """Whether buckets cost over a fifth more steps, or put over a tenth of the samples in short steps. What is left
        over of a set of one bucket is nobody's fault."""
        return self.steps > self.fewest and (
            self.steps > _MORE_STEPS * self.fewest or self.short_draws > _IN_SHORT_STEPS * self.draws
        )


@dataclass(frozen=True)
class _Epoch:
    """Where an epoch's draws lie: cell after cell, bucket after bucket; and its steps likewise."""

    before: Longs  # (cells,) draws of the cell in all epochs before
    cell_ends: Longs  # (cells,) in the epoch's draws
    bucket_starts: Longs  # (buckets,) in the epoch's draws
    bucket_draws: Longs  # (buckets,)
    step_ends: Longs  # (buckets,) in the epoch's steps, before they are shuffled

    @property
    def draws(self) -> int:
        return int(self.cell_ends[-1])

    @property
    def steps(self) -> int:
        return int(self.step_ends[-1])


class SampleSchedule:
    """The samples of every optimizer step, forever.

    It holds 4 bytes a sample and a few words a cell. A step is found in under a millisecond, whichever it is.

    Args:
        buckets: (n,) whole numbers, the bucket of each sample. Only which of them are equal matters.
        seed: of the run.
        global_size: samples of a full step over all ranks.
        repeats: how often samples come; None: each once an epoch.
    """

    def __init__(
        self, buckets: npt.NDArray[np.integer], *, seed: int, global_size: int, repeats: Repeats | None = None
    ) -> None:
        assert len(buckets) > 0, "a schedule needs samples; the readers refuse empty data sets"
        assert global_size > 0
        self._seed, self._global_size = seed, global_size
        self._cells = cells = _cells(buckets, repeats)
        self._groups = 1 if repeats is None else len(repeats.rates)
        self._first_cells = np.flatnonzero(np.diff(cells.buckets, prepend=-1))  # of each bucket
        rates = np.ones(len(cells.sizes)) if repeats is None else repeats.rates[cells.groups]
        self._rates = np.maximum(np.rint(rates * cells.sizes * 2.0**_UNIT), 1).astype(np.int64)  # draws an epoch
        self._phases = (np.cumsum(self._rates) - self._rates) % (1 << _UNIT)
        self._constant = not np.any(self._rates % (1 << _UNIT))
        self._first_steps = [0]  # of epochs, as far as they were asked for; unused if all are alike
        self._layout = lru_cache(maxsize=2)(self._lay_out)  # a reader ahead may be in the next epoch already

    @property
    def sample_count(self) -> int:
        """Number of samples of the data set."""
        return len(self._cells.order)

    @property
    def is_constant(self) -> bool:
        """Whether all epochs have the same number of draws and steps."""
        return self._constant

    @cached_property
    def steps_per_epoch(self) -> int:
        """Optimizer steps of the first epoch; of every epoch, where each sample comes once."""
        return self._layout(0).steps

    @cached_property
    def filling(self) -> Filling:
        """How full the steps of the first epoch are; of every epoch, where each sample comes once."""
        layout = self._layout(0)
        left_over = layout.bucket_draws % self._global_size
        return Filling(
            layout.steps,
            -(-layout.draws // self._global_size),
            layout.draws,
            int(np.count_nonzero(left_over)),
            int(left_over.sum()),
            int(np.count_nonzero(layout.bucket_draws)),
        )

    def steps_before_epoch(self, epoch: int) -> int:
        """Optimizer steps of all epochs before this one together."""
        if self._constant:
            return epoch * self.steps_per_epoch
        while len(self._first_steps) <= epoch:
            self._first_steps.append(self._first_steps[-1] + self._lay_out(len(self._first_steps) - 1).steps)
        return self._first_steps[epoch]

    def epoch_of(self, global_step: int) -> int:
        """Epoch that optimizer step `global_step`, counted from 0, belongs to."""
        if self._constant:
            return global_step // self.steps_per_epoch
        while self._first_steps[-1] <= global_step:
            self.steps_before_epoch(len(self._first_steps))
        return bisect.bisect_right(self._first_steps, global_step) - 1

    def step(self, global_step: int) -> StepPlan:
        """The samples of optimizer step `global_step`, counted from 0 over all epochs."""
        epoch = self.epoch_of(global_step)
        layout = self._layout(epoch)
        position = np.array([global_step - self.steps_before_epoch(epoch)])
        number = int(shuffled(position, layout.steps, self._key(_STEPS, epoch))[0])
        bucket = int(np.searchsorted(layout.step_ends, number, side="right"))
        first_step = layout.step_ends[bucket - 1] if bucket else 0
        start = int(number - first_step) * self._global_size
        size = int(layout.bucket_draws[bucket])
        places = np.arange(start, min(start + self._global_size, size))
        draws = layout.bucket_starts[bucket] + shuffled(places, size, self._key(_DRAWS, epoch, bucket))
        cells = np.searchsorted(layout.cell_ends, draws, side="right")
        in_cell = draws - np.where(cells > 0, layout.cell_ends[cells - 1], 0)
        sizes = self._cells.sizes[cells]
        on_circle = (layout.before[cells] + in_cell) % sizes
        members = shuffled(on_circle, sizes, self._key(_CIRCLE, cells))
        indices = self._cells.order[self._cells.starts[cells] + members]
        repeated = in_cell // sizes
        return StepPlan(global_step, epoch, tuple(indices.tolist()), tuple(repeated.tolist()))

    def samples_before(self, global_step: int) -> int:
        """Number of samples that the steps before `global_step` draw together."""
        epoch = self.epoch_of(global_step)
        layout = self._layout(epoch)
        position = global_step - self.steps_before_epoch(epoch)
        short = layout.step_ends - 1  # the last step of each bucket
        short = short[np.diff(layout.step_ends, prepend=0) > 0]
        lacking = -layout.bucket_draws[layout.bucket_draws > 0] % self._global_size
        earlier = positions_of(short, layout.steps, self._key(_STEPS, epoch)) < position
        return int(layout.before.sum()) + position * self._global_size - int(lacking[earlier].sum())

    def drawn(self, first: int, last: int) -> Longs:
        """(groups,) draws of each group of `Repeats` in the epochs `first` up to, not including, `last`."""
        draws = self._draws_before(last) - self._draws_before(first)
        return np.bincount(self._cells.groups, draws, self._groups).astype(np.int64)

    def _draws_before(self, epoch: int) -> Longs:
        before: Longs = (self._rates * epoch + self._phases) >> _UNIT
        return before

    def _lay_out(self, epoch: int) -> _Epoch:
        before = self._draws_before(epoch)
        draws = self._draws_before(epoch + 1) - before
        bucket_draws = np.add.reduceat(draws, self._first_cells)
        ends = np.cumsum(draws)
        steps = -(-bucket_draws // self._global_size)
        return _Epoch(before, ends, np.cumsum(bucket_draws) - bucket_draws, bucket_draws, np.cumsum(steps))

    def _key(self, purpose: int, *words: int | Longs) -> Keys:
        return key(self._seed, purpose, *words)


@dataclass(frozen=True)
class _Cells:
    """Samples that come equally often and are of one bucket."""

    order: npt.NDArray[np.integer]  # (n,) samples, cell after cell
    starts: Longs  # (cells,) where each begins there
    sizes: Longs  # (cells,)
    buckets: Longs  # (cells,) ascending
    groups: Longs  # (cells,) of `Repeats`


def _cells(buckets: npt.NDArray[np.integer], repeats: Repeats | None) -> _Cells:
    """Buckets, and the cells of a bucket, are in the order in which they first come among the samples, so that codes
    mean nothing but which samples are together."""
    count = len(buckets)
    codes = _by_appearance(buckets)
    cell_of: npt.NDArray[np.integer] = codes
    if repeats is not None:
        cell_of = codes.astype(np.int64) * len(repeats.rates) + _by_appearance(repeats.groups)
    if int(cell_of.max()) < 1 << 16:
        cell_of = cell_of.astype(np.uint16)  # sorted in linear time
    order: npt.NDArray[np.integer] = np.argsort(cell_of, kind="stable")
    if count <= 1 << 31:
        order = order.astype(np.int32)
    begins = np.ones(count, bool)
    for start in range(1, count, 1 << 20):  # in parts: gathering all would take 8 bytes a sample
        part = cell_of[order[start - 1 : start + (1 << 20)]]
        begins[start : start + (1 << 20)] = part[1:] != part[:-1]
    starts = np.flatnonzero(begins).astype(np.int64)
    firsts = order[starts]
    groups = np.zeros(len(starts), np.int64) if repeats is None else repeats.groups[firsts].astype(np.int64)
    sizes = np.diff(np.append(starts, count)).astype(np.int64)
    return _Cells(order, starts, sizes, codes[firsts].astype(np.int64), groups)


def _by_appearance(codes: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
    """The same codes numbered from 0 in the order in which they first come; codes are small whole numbers."""
    lowest, highest = int(codes.min()), int(codes.max())
    assert lowest >= 0
    first = np.full(highest + 1, len(codes), np.int64)
    np.minimum.at(first, codes, np.arange(len(codes)))
    number = np.empty(highest + 1, np.int32)
    number[np.argsort(first, kind="stable")] = np.arange(highest + 1)
    renumbered: npt.NDArray[np.int32] = number[codes]
    return renumbered
