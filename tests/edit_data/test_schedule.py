from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_edit_zero.edit_data.batches.schedule import SampleSchedule, StepPlan, micro_batches

buckets = st.lists(st.integers(0, 4), min_size=1, max_size=60)
sizes = st.integers(1, 17)
seeds = st.integers(0, 2**63)


def epoch(schedule: SampleSchedule, number: int) -> list[StepPlan]:
    first = number * schedule.steps_per_epoch
    return [schedule.step(step) for step in range(first, first + schedule.steps_per_epoch)]


@given(buckets, seeds, sizes, st.integers(0, 3))
def test_an_epoch_holds_each_sample_exactly_once(buckets: list[int], seed: int, size: int, number: int) -> None:
    plans = epoch(SampleSchedule(buckets, seed=seed, global_size=size), number)
    assert sorted(i for plan in plans for i in plan.indices) == list(range(len(buckets)))
    assert {plan.epoch for plan in plans} == {number}


@given(buckets, seeds, sizes)
def test_a_step_is_of_one_bucket_and_full_unless_it_is_the_buckets_last(
    buckets: list[int], seed: int, size: int
) -> None:
    plans = epoch(SampleSchedule(buckets, seed=seed, global_size=size), 0)
    for plan in plans:
        assert len({buckets[i] for i in plan.indices}) == 1
        assert 1 <= len(plan.indices) <= size
    short = Counter(buckets[plan.indices[0]] for plan in plans if len(plan.indices) < size)
    assert all(count == 1 for count in short.values())
    assert len(plans) == sum(-(-count // size) for count in Counter(buckets).values())


@given(buckets, seeds, sizes, st.integers(0, 100))
def test_a_step_does_not_depend_on_the_steps_asked_for_before(
    buckets: list[int], seed: int, size: int, step: int
) -> None:
    used = SampleSchedule(buckets, seed=seed, global_size=size)
    for earlier in (0, step + 7, step // 2, 3 * step):
        used.step(earlier)
    fresh = SampleSchedule([str(b) for b in buckets], seed=seed, global_size=size)
    assert used.step(step) == fresh.step(step)


@given(buckets, seeds, sizes, st.integers(0, 100))
def test_samples_before_a_step_are_those_of_the_steps_before(
    buckets: list[int], seed: int, size: int, step: int
) -> None:
    schedule = SampleSchedule(buckets, seed=seed, global_size=size)
    assert schedule.samples_before(step) == sum(len(schedule.step(s).indices) for s in range(step))


def test_order_changes_with_seed_and_epoch_and_buckets_are_interleaved() -> None:
    buckets = [0] * 200 + [1] * 200
    schedule = SampleSchedule(buckets, seed=1, global_size=4)
    orders = [[p.indices for p in epoch(s, e)] for s, e in (
        (schedule, 0), (schedule, 1), (SampleSchedule(buckets, seed=2, global_size=4), 0),
    )]  # fmt: skip
    assert orders[0] != orders[1]
    assert orders[0] != orders[2]
    of_bucket = [buckets[indices[0]] for indices in orders[0]]
    changes = sum(a != b for a, b in itertools.pairwise(of_bucket))
    assert 30 < changes < 70  # 50 expected of 100 steps in random order; 1 if the buckets came one after the other


def test_every_position_is_equally_likely() -> None:
    """Chi-square over where sample 0 comes in 4,000 epochs of 20; the 99.9 % point for 19 degrees is 43.8."""
    schedule = SampleSchedule([0] * 20, seed=3, global_size=1)
    counts = Counter([p.indices[0] for p in epoch(schedule, e)].index(0) for e in range(4000))
    assert sum((counts[i] - 200) ** 2 / 200 for i in range(20)) < 43.8


def test_the_order_is_pinned_for_runs_that_were_begun_with_older_versions() -> None:
    schedule = SampleSchedule([0, 1, 0, 1, 0, 1, 0, 1, 0, 0], seed=42, global_size=3)
    assert [schedule.step(i).indices for i in range(8)] == [
        (1,),
        (6, 8, 4),
        (0, 9, 2),
        (5, 3, 7),
        (5, 1, 3),
        (0, 9, 2),
        (8, 6, 4),
        (7,),
    ]


@settings(max_examples=300)
@given(st.integers(1, 70), st.integers(1, 9), st.integers(1, 9))
def test_shares_of_ranks_are_even_complete_and_need_the_same_number_of_forwards(
    total: int, world_size: int, micro_size: int
) -> None:
    plan = StepPlan(0, 0, tuple(range(100, 100 + total)))
    shares = [micro_batches(plan, rank=r, world_size=world_size, micro_size=micro_size) for r in range(world_size)]
    assert len({len(share) for share in shares}) == 1
    real = [[m for m in share if not m.filler] for share in shares]
    assert [i for share in real for m in share for i in m.indices] == list(plan.indices)
    counts = [sum(len(m.indices) for m in share) for share in real]
    assert max(counts) - min(counts) <= 1
    assert all(1 <= len(m.indices) <= micro_size for share in shares for m in share)
    for share in real:
        lengths = [len(m.indices) for m in share]
        assert not lengths or max(lengths) - min(lengths) <= 1
    assert len(shares[0]) == -(-max(counts) // micro_size), "no more forwards than the largest share needs"
    fillers = [m for share in shares for m in share if m.filler]
    assert all(m.indices == plan.indices[:1] for m in fillers)
