from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from qwen_edit_zero.edit_data.batches.batch import EditBatch, collate
from qwen_edit_zero.edit_data.batches.loader import BatchLoader
from qwen_edit_zero.edit_data.batches.schedule import SampleSchedule
from qwen_edit_zero.edit_data.cache.store import SampleKey
from qwen_edit_zero.edit_data.manifests.manifest import Sample
from qwen_edit_zero.edit_data.storage.local import LocalPlace
from qwen_edit_zero.errors import DataError
from tests.edit_data.builders import entry
from tests.edit_data.filled import filled_cache


def batch_of(*lengths: int, references: int = 1) -> EditBatch:
    entries = [entry(i, tokens=length, references=references) for i, length in enumerate(lengths)]
    ids = [f"a{i}" for i in range(len(lengths))]
    return collate(entries, weights=[1.0] * len(lengths), sample_ids=ids, epoch=2)


def test_prompts_are_padded_with_zeros_on_the_right_and_masked() -> None:
    batch = batch_of(3, 7, 5, references=2)
    assert batch.prompt_embeds.shape == (3, 7, 8)
    assert batch.prompt_mask is not None
    assert batch.prompt_mask.sum(1).tolist() == [3, 7, 5]
    for i, length in enumerate((3, 7, 5)):
        assert torch.equal(batch.prompt_embeds[i, :length], entry(i, tokens=length, references=2).prompt_embeds)
        assert batch.prompt_embeds[i, length:].count_nonzero() == 0
        assert batch.prompt_mask[i, :length].all()
        assert torch.equal(batch.target_latents[i], entry(i, tokens=length, references=2).target_latent)
    assert [tuple(t.shape) for t in batch.reference_latents] == [(3, 16, 4, 4), (3, 16, 4, 6)]
    assert (len(batch), batch.sample_ids, batch.epoch) == (3, ("a0", "a1", "a2"), 2)


@pytest.mark.parametrize("lengths", [(4,), (4, 4)])
def test_where_nothing_is_padded_there_is_no_mask(lengths: tuple[int, ...]) -> None:
    assert batch_of(*lengths).prompt_mask is None


def test_a_batch_of_different_buckets_is_never_made() -> None:
    with pytest.raises(AssertionError, match="different buckets"):
        collate([entry(0), entry(1, references=2)], weights=[1, 1], sample_ids=["a", "b"], epoch=0)


def test_moving_a_batch_moves_every_tensor_and_nothing_else() -> None:
    moved = batch_of(2, 3).to("meta")
    tensors = [moved.target_latents, *moved.reference_latents, moved.prompt_embeds, moved.prompt_mask, moved.weights]
    assert all(t is not None and t.device.type == "meta" for t in tensors)
    assert moved.sample_ids == ("a0", "a1")


class Data:
    """A filled cache of samples in two buckets."""

    def __init__(self, folder: Path, count: int = 13) -> None:
        self.samples = [
            Sample(f"a{i}", LocalPlace(folder), ("s",), "x", "t", weight=1.0 + i, line=i + 1) for i in range(count)
        ]
        made = [entry(i, tokens=3 + i % 4, references=1 + i % 2) for i in range(count)]
        self.cache, self.keys = filled_cache(folder, made)
        self.schedule = SampleSchedule([i % 2 for i in range(count)], seed=0, global_size=4)

    def loader(self, *, rank: int = 0, world_size: int = 1, micro_size: int = 2, prefetch: int = 4) -> BatchLoader:
        return BatchLoader(
            self.samples, self.keys, self.cache, self.schedule,
            rank=rank, world_size=world_size, micro_size=micro_size, prefetch=prefetch,
        )  # fmt: skip


@pytest.mark.parametrize(("world_size", "micro_size"), [(1, 1), (1, 4), (2, 1), (3, 2), (5, 1)])
def test_all_ranks_together_read_the_steps_of_the_schedule(tmp_path: Path, world_size: int, micro_size: int) -> None:
    data = Data(tmp_path)
    steps = 2 * data.schedule.steps_per_epoch
    seen: list[list[str]] = [[] for _ in range(steps)]
    forwards: list[set[int]] = [set() for _ in range(steps)]
    for rank in range(world_size):
        with data.loader(rank=rank, world_size=world_size, micro_size=micro_size) as loader:
            for plan, batches in loader.steps(0, steps):
                forwards[plan.step].add(len(batches))
                for batch in batches:
                    assert batch.epoch == plan.epoch
                    if batch.weights.count_nonzero():
                        seen[plan.step] += batch.sample_ids
                        assert batch.weights.tolist() == [1.0 + int(i[1:]) for i in batch.sample_ids]
    for step in range(steps):
        assert seen[step] == [f"a{i}" for i in data.schedule.step(step).indices]
        assert len(forwards[step]) == 1


def test_starting_in_the_middle_gives_the_same_batches(tmp_path: Path) -> None:
    data = Data(tmp_path)

    def read(first: int) -> list[tuple[int, list[tuple[str, ...]]]]:
        with data.loader() as loader:
            return [(plan.step, [b.sample_ids for b in batches]) for plan, batches in loader.steps(first, 12)]

    assert read(5) == read(0)[5:]


def test_values_are_those_of_the_cache(tmp_path: Path) -> None:
    data = Data(tmp_path)
    with data.loader() as loader:
        for _, batches in loader.steps(0, 4):
            for batch in batches:
                for i, name in enumerate(batch.sample_ids):
                    made = entry(n := int(name[1:]), tokens=3 + n % 4, references=1 + n % 2)
                    assert torch.equal(batch.target_latents[i], made.target_latent)
                    assert torch.equal(batch.prompt_embeds[i, : 3 + n % 4], made.prompt_embeds)


def test_a_damaged_entry_is_raised_to_the_one_who_takes_the_batch(tmp_path: Path) -> None:
    data = Data(tmp_path)
    bad = data.schedule.step(2).indices[0]
    for shard in data.cache.prompts.shards.glob("*.safetensors"):
        content = shard.read_bytes()
        if data.keys[bad].prompt.hex().encode() in content:
            shard.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    with data.loader() as loader:
        steps = loader.steps(0)
        for _ in range(2):
            _, batches = next(steps)
            assert list(batches)
        _, batches = next(steps)
        with pytest.raises(DataError, match=data.keys[bad].prompt.hex()):
            list(batches)


def test_reading_goes_on_while_the_caller_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Data(tmp_path)
    real = data.cache.get

    def slow(key: SampleKey) -> object:
        time.sleep(0.02)
        return real(key)

    monkeypatch.setattr(data.cache, "get", slow)
    with data.loader() as loader:
        waited = 0.0
        for plan, batches in loader.steps(0, 12):
            before = loader.wait_seconds
            for _ in batches:
                time.sleep(0.06)
            waited += loader.wait_seconds - before if plan.step > 0 else 0.0
    assert waited < 0.2, "two threads read for 0.4 s, and that is hidden behind the caller's own time"


def test_no_more_is_read_ahead_than_was_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = Data(tmp_path)
    read: list[SampleKey] = []
    real = data.cache.get
    monkeypatch.setattr(data.cache, "get", lambda key: read.append(key) or real(key))
    with data.loader(micro_size=1, prefetch=3) as loader:
        steps = loader.steps(0)
        next(steps)
        deadline = time.monotonic() + 20
        while len(read) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.1)
        assert len(read) == 3


def test_leaving_the_loader_ends_its_threads(tmp_path: Path) -> None:
    data = Data(tmp_path)
    with data.loader() as loader:
        next(loader.steps(0))
        assert any(t.name.startswith("batches") for t in threading.enumerate())
    assert not any(t.name.startswith("batches") for t in threading.enumerate())
