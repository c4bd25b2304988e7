"""Micro-batches: padding, masks, devices."""

from __future__ import annotations

import pytest
import torch

from qwen_edit_zero.edit_data.batches.batch import EditBatch, collate
from tests.edit_data.made_entries import MadeEntry, made_entry


def batch_of(*lengths: int, references: int = 1) -> EditBatch:
    entries = [made_entry(i, tokens=length, references=references) for i, length in enumerate(lengths)]
    ids = [f"a{i}" for i in range(len(lengths))]
    return collate(entries, weights=[1.0] * len(lengths), sample_ids=ids, epoch=2, draws=range(len(lengths)))


def test_prompts_are_padded_with_zeros_on_the_right_and_masked() -> None:
    batch = batch_of(3, 7, 5, references=2)
    assert batch.prompt_embeds.shape == (3, 7, 8)
    assert batch.prompt_mask is not None
    assert batch.prompt_mask.sum(1).tolist() == [3, 7, 5]
    for i, length in enumerate((3, 7, 5)):
        made = made_entry(i, tokens=length, references=2)
        assert torch.equal(batch.prompt_embeds[i, :length], made.prompt_embeds)
        assert batch.prompt_embeds[i, length:].count_nonzero() == 0
        assert batch.prompt_mask[i, :length].all()
        assert torch.equal(batch.target_latents[i], made.target_latent)
    assert [tuple(t.shape) for t in batch.reference_latents] == [(3, 16, 4, 4), (3, 16, 4, 6)]
    assert (len(batch), batch.sample_ids, batch.epoch, batch.draws) == (3, ("a0", "a1", "a2"), 2, (0, 1, 2))


@pytest.mark.parametrize("lengths", [(4,), (4, 4)])
def test_where_nothing_is_padded_there_is_no_mask(lengths: tuple[int, ...]) -> None:
    assert batch_of(*lengths).prompt_mask is None


def test_a_batch_of_different_buckets_is_never_made() -> None:
    with pytest.raises(AssertionError, match="different buckets"):
        collate([made_entry(0), made_entry(1, references=2)], weights=[1, 1], sample_ids=["a", "b"], epoch=0)


def test_samples_without_a_mask_get_an_empty_one_only_beside_samples_that_have_one() -> None:
    plain, mask = made_entry(0), torch.randint(0, 256, (4, 6), dtype=torch.uint8)
    masked = MadeEntry(plain.target_latent, plain.reference_latents, plain.prompt_embeds, mask)
    together = collate([plain, masked], weights=[1, 1], sample_ids=["a", "b"], epoch=0)
    assert together.mask is not None
    assert torch.equal(together.mask, torch.stack([torch.zeros(4, 6), mask / 255]))
    assert collate([plain, plain], weights=[1, 1], sample_ids=["a", "b"], epoch=0).mask is None


def test_moving_a_batch_moves_every_tensor_and_nothing_else() -> None:
    plain = made_entry(0)
    masked = MadeEntry(plain.target_latent, plain.reference_latents, plain.prompt_embeds[:2], torch.ones(4, 6).byte())
    batch = collate([plain, masked], weights=[1, 1], sample_ids=["a0", "a1"], epoch=0, filler=True)
    moved = batch.to("meta")
    assert all(t.device.type == "meta" for t in moved.tensors())
    assert len(list(moved.tensors())) == 6
    assert (moved.sample_ids, moved.filler) == (("a0", "a1"), True)
