"""Which samples each step draws."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_edit_zero.edit_data.batches.repeats import Repeats, repeats
from qwen_edit_zero.edit_data.batches.schedule import SampleSchedule, StepPlan
from qwen_edit_zero.edit_data.batches.shuffle import key, positions_of, shuffled

buckets = st.lists(st.integers(0, 4), min_size=1, max_size=60)
sizes = st.integers(1, 17)
seeds = st.integers(0, 2**63)


@st.composite
def repeated(draw: st.DrawFn) -> tuple[npt.NDArray[np.int32], Repeats | None]:
    """Buckets of samples, and how often they come."""
    of_bucket = draw(buckets)
    count = len(of_bucket)
    categories = draw(st.lists(st.integers(0, 3), min_size=count, max_size=count))
    weights = draw(st.none() | st.lists(st.sampled_from([0.05, 0.3, 1, 1.5, 7]), min_size=count, max_size=count))
    factors = st.dictionaries(st.sampled_from([str(c) for c in set(categories)]), st.floats(0.01, 50))
    balance = draw(st.sampled_from(["none", "sqrt", "uniform"]) | factors)
    how_often = repeats(
        np.array(categories, np.int32),
        ["0", "1", "2", "3"],
        balance=balance,
        weights=None if weights is None else np.array(weights, np.float32),
    )
    return np.array(of_bucket, np.int32), how_often


def plain(buckets: list[Any], *, seed: int, size: int) -> SampleSchedule:
    return SampleSchedule(np.array(buckets, np.int32), seed=seed, global_size=size)


def epoch(schedule: SampleSchedule, number: int) -> list[StepPlan]:
    return [schedule.step(s) for s in range(*map(schedule.steps_before_epoch, (number, number + 1)))]


def counts(schedule: SampleSchedule, number: int) -> npt.NDArray[np.int64]:
    return np.bincount([i for p in epoch(schedule, number) for i in p.indices], minlength=schedule.sample_count)


@given(buckets, seeds, sizes, st.integers(0, 3))
def test_an_epoch_holds_each_sample_exactly_once(buckets: list[int], seed: int, size: int, number: int) -> None:
    schedule = plain(buckets, seed=seed, size=size)
    plans = epoch(schedule, number)
    assert sorted(i for plan in plans for i in plan.indices) == list(range(len(buckets)))
    assert {plan.epoch for plan in plans} == {number}
    assert all(not any(plan.draws) for plan in plans)
    assert len(plans) == schedule.steps_per_epoch == sum(-(-n // size) for n in Counter(buckets).values())


@given(repeated(), seeds, sizes, st.integers(1, 12))
def test_after_any_number_of_epochs_each_sample_came_as_often_as_its_rate_says(
    data: tuple[npt.NDArray[np.int32], Repeats | None], seed: int, size: int, epochs: int
) -> None:
    of_bucket, how_often = data
    schedule = SampleSchedule(of_bucket, seed=seed, global_size=size, repeats=how_often)
    rates = np.ones(len(of_bucket)) if how_often is None else how_often.rates[how_often.groups]
    assert np.isclose(rates.sum(), len(of_bucket))
    came = np.zeros(len(of_bucket), np.int64)
    by_epoch = [counts(schedule, e) for e in range(epochs)]
    for done, drawn in enumerate(by_epoch, 1):
        came += drawn
        assert np.all(np.abs(came - rates * done) < 1 + 1e-5 * done)
    if how_often is not None:
        for first in range(epochs):
            by_group = np.bincount(how_often.groups, sum(by_epoch[first:]), len(how_often.rates))
            assert schedule.drawn(first, epochs).tolist() == by_group.tolist()


@given(repeated(), seeds, sizes)
def test_a_step_is_of_one_bucket_and_full_unless_it_is_the_buckets_last(
    data: tuple[npt.NDArray[np.int32], Repeats | None], seed: int, size: int
) -> None:
    of_bucket, how_often = data
    plans = epoch(SampleSchedule(of_bucket, seed=seed, global_size=size, repeats=how_often), 1)
    for plan in plans:
        assert len(set(of_bucket[list(plan.indices)].tolist())) == 1
        assert 1 <= len(plan.indices) <= size
    short = Counter(int(of_bucket[plan.indices[0]]) for plan in plans if len(plan.indices) < size)
    assert all(count == 1 for count in short.values())


@given(repeated(), seeds, sizes)
def test_how_full_steps_are_is_what_the_steps_of_an_epoch_say(
    data: tuple[npt.NDArray[np.int32], Repeats | None], seed: int, size: int
) -> None:
    of_bucket, how_often = data
    schedule = SampleSchedule(of_bucket, seed=seed, global_size=size, repeats=how_often)
    plans = epoch(schedule, 0)
    filling = schedule.filling
    short = [len(plan.indices) for plan in plans if len(plan.indices) < size]
    assert (filling.steps, filling.short_steps, filling.short_draws) == (len(plans), len(short), sum(short))
    assert filling.draws == sum(len(plan.indices) for plan in plans)
    assert filling.buckets == len({of_bucket[plan.indices[0]] for plan in plans})
    assert filling.fewest == -(-filling.draws // size) <= filling.steps


@given(repeated(), seeds, sizes)
def test_each_time_a_sample_comes_in_an_epoch_it_is_another_draw(
    data: tuple[npt.NDArray[np.int32], Repeats | None], seed: int, size: int
) -> None:
    of_bucket, how_often = data
    schedule = SampleSchedule(of_bucket, seed=seed, global_size=size, repeats=how_often)
    for number in range(3):
        came: dict[int, list[int]] = {}
        for plan in epoch(schedule, number):
            for index, draw in zip(plan.indices, plan.draws, strict=True):
                came.setdefault(index, []).append(draw)
        assert all(sorted(draws) == list(range(len(draws))) for draws in came.values())


@given(repeated(), seeds, sizes, st.integers(0, 100))
def test_a_step_does_not_depend_on_the_steps_asked_for_before_nor_on_the_names_of_buckets(
    data: tuple[npt.NDArray[np.int32], Repeats | None], seed: int, size: int, step: int
) -> None:
    of_bucket, how_often = data
    used = SampleSchedule(of_bucket, seed=seed, global_size=size, repeats=how_often)
    for earlier in (0, step + 7, step // 2, 3 * step):
        used.step(earlier)
    other_names = (of_bucket * 3 + 5).astype(np.int32)
    assert used.step(step) == SampleSchedule(other_names, seed=seed, global_size=size, repeats=how_often).step(step)


@given(repeated(), seeds, sizes, st.integers(0, 60))
def test_samples_and_epochs_before_a_step_are_those_of_the_steps_before(
    data: tuple[npt.NDArray[np.int32], Repeats | None], seed: int, size: int, step: int
) -> None:
    of_bucket, how_often = data
    schedule = SampleSchedule(of_bucket, seed=seed, global_size=size, repeats=how_often)
    before = [schedule.step(s) for s in range(step)]
    assert schedule.samples_before(step) == sum(len(plan.indices) for plan in before)
    assert [plan.epoch for plan in before] == [schedule.epoch_of(s) for s in range(step)]
    assert schedule.steps_before_epoch(schedule.epoch_of(step)) <= step


def test_fractions_of_a_draw_rotate_over_epochs() -> None:
    """Weights 1 and 1/3, nearly, so rates of 2 and 2/3: a rare sample comes evenly, and epochs have as many of them."""
    weights = np.array([1.0] * 10 + [1 / 3] * 30, np.float32)
    how_often = repeats(np.zeros(40, np.int32), [""], weights=weights)
    assert how_often is not None
    schedule = SampleSchedule(np.zeros(40, np.int32), seed=0, global_size=4, repeats=how_often)
    by_epoch = np.stack([counts(schedule, e) for e in range(30)])
    assert by_epoch[:, :10].sum() / by_epoch.sum() == pytest.approx(0.5, abs=0.01)
    rare = by_epoch[:, 10:]
    for first in range(24):
        assert rare[first : first + 6].sum(axis=0).min() >= 3
    assert rare.sum(axis=1).max() - rare.sum(axis=1).min() <= 1


def test_order_changes_with_seed_and_epoch_and_buckets_are_interleaved() -> None:
    buckets = [0] * 200 + [1] * 200
    schedule = plain(buckets, seed=1, size=4)
    orders = [[p.indices for p in epoch(s, e)] for s, e in (
        (schedule, 0), (schedule, 1), (plain(buckets, seed=2, size=4), 0),
    )]  # fmt: skip
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]
    of_bucket = [buckets[indices[0]] for indices in orders[0]]
    changes = sum(a != b for a, b in itertools.pairwise(of_bucket))
    assert 30 < changes < 70  # 50 expected of 100 steps in random order; 1 if the buckets came one after the other


def test_every_position_is_equally_likely() -> None:
    """Chi-square over where sample 0 comes in 400 epochs of 20; the 99.9 % point for 19 degrees is 43.8."""
    schedule = plain([0] * 20, seed=3, size=1)
    found = Counter([p.indices[0] for p in epoch(schedule, e)].index(0) for e in range(400))
    assert sum((found[i] - 20) ** 2 / 20 for i in range(20)) < 43.8


@given(st.integers(1, 3000), seeds)
def test_a_shuffle_is_a_permutation_and_can_be_asked_backwards(size: int, seed: int) -> None:
    everything = np.arange(size)
    order = shuffled(everything, size, key(seed))
    assert sorted(order.tolist()) == everything.tolist()
    assert positions_of(order, size, key(seed)).tolist() == everything.tolist()


def test_every_order_of_five_is_equally_likely() -> None:
    """Chi-square over the 120 orders; the 99.9 % point for 119 degrees is 172."""
    keys = key(7, np.arange(48_000))
    columns = [shuffled(np.full(len(keys), place), 5, keys) for place in range(5)]
    found = Counter(zip(*(column.tolist() for column in columns), strict=True))
    assert sum((found[order] - 400) ** 2 / 400 for order in itertools.permutations(range(5))) < 172


def test_two_neighbours_of_a_hundred_are_parted_as_if_at_random() -> None:
    """Chi-square over the 9,900 pairs of places; its standard deviation is 141."""
    keys = key(9, np.arange(200_000))
    first, second = (shuffled(np.full(len(keys), place), 100, keys) for place in (3, 4))
    found = np.bincount(first * 100 + second, minlength=10_000).reshape(100, 100)[~np.eye(100, dtype=bool)]
    assert abs(((found - 200_000 / 9900) ** 2 / (200_000 / 9900)).sum() - 9899) < 4 * 141


PINNED = """
import numpy as np
from qwen_edit_zero.edit_data.batches.repeats import repeats
from qwen_edit_zero.edit_data.batches.schedule import SampleSchedule
buckets = np.array([0, 1, 0, 1, 0, 1, 0, 1, 0, 0], np.int32)
plain = SampleSchedule(buckets, seed=42, global_size=3)
print([plain.step(i).indices for i in range(8)])
how = repeats(np.array([0, 0, 0, 0, 0, 0, 0, 0, 1, 1], np.int32), ["a", "b"], balance="uniform")
balanced = SampleSchedule(buckets, seed=42, global_size=3, repeats=how)
print([(balanced.step(i).indices, balanced.step(i).draws) for i in range(4)])
"""


def test_the_order_is_pinned_for_runs_that_were_begun_with_older_versions_in_other_processes() -> None:
    done = subprocess.run([sys.executable, "-c", PINNED], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "[(0, 9, 2), (6, 8, 4), (5, 1, 7), (3,), (1,), (5, 3, 7), (0, 4, 2), (8, 6, 9)]",
        "[((8, 9, 6), (1, 2, 0)), ((2, 9, 9), (0, 1, 0)), ((8,), (0,)), ((7, 3, 5), (0, 0, 0))]",
    ]


def test_the_plan_of_ten_million_samples_takes_little_memory() -> None:
    """Measured in a process of its own: 4 bytes a sample stay, and less than 300 MB are touched while it is made."""
    script = """
import resource
import numpy as np
from qwen_edit_zero.edit_data.batches.schedule import SampleSchedule
buckets = np.random.default_rng(0).integers(0, 500, 10_000_000, np.int32)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
schedule = SampleSchedule(buckets, seed=1, global_size=512)
schedule.step(10**8), schedule.samples_before(10**8)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert float(done.stdout) < 300
