"""Compound buckets."""

from __future__ import annotations

from qwen_edit_zero.edit_data.batches.buckets import Bucket
from qwen_edit_zero.edit_model.sizes import token_count


def test_a_bucket_knows_latents_and_tokens_of_the_target_and_the_references_in_order() -> None:
    wide, tall = (96, 192), (192, 96)
    bucket = Bucket(wide, (tall, (64, 64)))
    assert bucket != Bucket(wide, ((64, 64), tall))
    assert bucket.target_latent == (12, 24)
    assert bucket.reference_latents == ((24, 12), (8, 8))
    assert bucket.image_tokens == token_count(bucket.target_latent, *bucket.reference_latents)
    assert str(bucket) == "192x96 + 96x192 + 64x64"
