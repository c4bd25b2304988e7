"""Batches of one rank, read ahead."""

from __future__ import annotations

import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from qwen_edit_zero.edit_data.batches.cost import SampleCosts
from qwen_edit_zero.edit_data.batches.loader import BatchLoader
from qwen_edit_zero.edit_data.batches.repeats import repeats
from qwen_edit_zero.edit_data.batches.schedule import SampleSchedule
from qwen_edit_zero.errors import DataError
from tests.edit_data.made_entries import MadeEntries, Named, made_entry


class Data:
    """Samples in two buckets; those of one category come more often."""

    def __init__(self, count: int = 13) -> None:
        self.samples = [Named(f"a{i}") for i in range(count)]
        self.weights = 1.0 + np.arange(count)
        self.cache = MadeEntries({i: made_entry(i, tokens=3 + i % 4, references=1 + i % 2) for i in range(count)})
        buckets = np.arange(count, dtype=np.int32) % 2
        how_often = repeats((np.arange(count) % 5 == 0).astype(np.int32), ["x", "y"], balance={"y": 2.5})
        self.schedule = SampleSchedule(buckets, seed=0, global_size=4, repeats=how_often)
        self.costs = SampleCosts(64, np.array([12, 18]), buckets, 3 + np.arange(count) % 4)

    def loader(self, **options: Any) -> BatchLoader[int]:
        defaults = {"rank": 0, "world_size": 1, "micro_size": 2, "weights": self.weights, "costs": self.costs}
        key_of = options.pop("key_of", lambda index, epoch, draw: index)
        return BatchLoader(self.samples, self.cache, key_of, self.schedule, **(defaults | options))


@pytest.mark.parametrize(("world_size", "micro_size"), [(1, 1), (1, 4), (2, 1), (3, 2), (5, 1)])
def test_all_ranks_together_read_the_steps_of_the_schedule(world_size: int, micro_size: int) -> None:
    data = Data()
    steps = data.schedule.steps_before_epoch(2)
    seen: list[list[tuple[str, int]]] = [[] for _ in range(steps)]
    forwards: list[set[tuple[int, float]]] = [set() for _ in range(steps)]
    for rank in range(world_size):
        with data.loader(rank=rank, world_size=world_size, micro_size=micro_size) as loader:
            for plan, batches in loader.steps(0, steps):
                forwards[plan.step].add((len(batches), batches.imbalance))
                for batch in batches:
                    assert batch.epoch == plan.epoch
                    assert batch.filler == (not batch.weights.any())
                    if not batch.filler:
                        seen[plan.step] += zip(batch.sample_ids, batch.draws, strict=True)
                        assert batch.weights.tolist() == [1.0 + int(i[1:]) for i in batch.sample_ids]
    for step in range(steps):
        plan = data.schedule.step(step)
        assert sorted(seen[step]) == sorted(zip((f"a{i}" for i in plan.indices), plan.draws, strict=True))
        assert len(forwards[step]) == 1


def test_without_weights_every_sample_counts_once() -> None:
    with Data().loader(weights=None) as loader:
        assert all(b.filler or b.weights.eq(1).all() for _, batches in loader.steps(0, 9) for b in batches)


@pytest.mark.parametrize("first", [1, 5, 11])
def test_starting_in_the_middle_gives_the_same_batches(first: int) -> None:
    data = Data()

    def read(first: int) -> list[tuple[int, list[tuple[str, ...]]]]:
        with data.loader() as loader:
            return [(plan.step, [b.sample_ids for b in batches]) for plan, batches in loader.steps(first, 14)]

    assert read(first) == read(0)[first:]


def test_values_are_those_of_the_cache() -> None:
    data = Data()
    with data.loader() as loader:
        for _, batches in loader.steps(0, 4):
            for batch in batches:
                for i, name in enumerate(batch.sample_ids):
                    made = data.cache.entries[n := int(name[1:])]
                    assert torch.equal(batch.target_latents[i], made.target_latent)
                    assert torch.equal(batch.prompt_embeds[i, : 3 + n % 4], made.prompt_embeds)


def test_what_is_read_may_depend_on_the_epoch_and_on_the_draw() -> None:
    """Which of a sample's texts a draw trains on is the caller's choice."""
    data = Data()
    asked = set()

    def key_of(index: int, epoch: int, draw: int) -> int:
        asked.add((index, epoch, draw))
        return index

    steps = data.schedule.steps_before_epoch(2)
    with data.loader(key_of=key_of) as loader:
        for _, batches in loader.steps(0, steps):
            list(batches)
    plans = [data.schedule.step(step) for step in range(steps)]
    assert asked == {(i, p.epoch, d) for p in plans for i, d in zip(p.indices, p.draws, strict=True)}
    assert {epoch for _, epoch, _ in asked} == {0, 1}
    assert {draw for *_, draw in asked} >= {0, 1}


def test_a_damaged_entry_is_raised_to_the_one_who_takes_the_batch() -> None:
    data = Data()
    bad = data.schedule.step(2).indices[0]
    whole = data.cache.get

    def get(key: int, /) -> Any:
        if key == bad:
            raise DataError(f"entry {key} is damaged")
        return whole(key)

    data.cache.get = get  # type: ignore[method-assign, assignment]
    with data.loader(prefetch=9) as loader:
        steps = loader.steps(0)
        for _ in range(2):
            plan, batches = next(steps)
            assert bad not in plan.indices
            assert list(batches)
        _, batches = next(steps)
        with pytest.raises(DataError, match=f"entry {bad} is damaged"):
            list(batches)


def test_reading_goes_on_while_the_caller_computes() -> None:
    """Deterministic: the caller computes until the next batches have been read, and then need not wait for them."""
    data = Data()
    real = data.cache.get
    read: list[int] = []

    def get(key: int, /) -> Any:
        read.append(key)
        return real(key)

    data.cache.get = get  # type: ignore[method-assign, assignment]
    total = sum(len(data.schedule.step(step).indices) for step in range(6))
    assert total > 10
    with data.loader(micro_size=1, prefetch=3) as loader:
        taken = 0
        for _, batches in loader.steps(0, 6):
            for _ in batches:
                taken += 1
                due, deadline = min(taken + 3, total), time.monotonic() + 60
                while len(read) < due and time.monotonic() < deadline:
                    time.sleep(0.001)
                assert len(read) == due, "what is taken is replaced, and no more is read than asked for"


def test_leaving_the_loader_ends_its_threads() -> None:
    with Data().loader(workers=3) as loader:
        next(loader.steps(0))
        assert any(t.name.startswith("batches") for t in threading.enumerate())
    assert not any(t.name.startswith("batches") for t in threading.enumerate())


def test_a_step_must_be_used_up_before_the_next() -> None:
    with Data().loader(micro_size=1) as loader:
        steps = loader.steps(0)
        next(steps)
        with pytest.raises(AssertionError, match="step 0 was left"):
            next(steps)
