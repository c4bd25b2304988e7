"""A cache that holds given samples, without pictures or encoders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from qwen_edit_zero.edit_data.cache.entries import Entries
from qwen_edit_zero.edit_data.cache.keys import KEY_BYTES
from qwen_edit_zero.edit_data.cache.ranks import Ranks
from qwen_edit_zero.edit_data.cache.store import CachedSample, ConditioningCache, SampleKey, entry_kind

LATENTS, PROMPTS = entry_kind("latent", {"vae": "test"}), entry_kind("prompt", {"text_encoder": "test"})


def filled_cache(folder: Path, samples: Sequence[CachedSample]) -> tuple[ConditioningCache, list[SampleKey]]:
    """The cache and the key of each sample."""
    cache = ConditioningCache(folder / "cache", LATENTS, PROMPTS, Ranks(), work=folder / "work")
    keys = []
    number = 0

    def put(entries: Entries, tensor: torch.Tensor) -> bytes:
        nonlocal number
        number += 1
        key = number.to_bytes(KEY_BYTES, "big")
        with entries.writer() as writer:
            writer.put(key, tensor)
        return key

    for sample in samples:
        references = tuple(put(cache.latents, reference) for reference in sample.reference_latents)
        mask = None if sample.mask is None else put(cache.masks, sample.mask)
        keys.append(
            SampleKey(
                put(cache.latents, sample.target_latent), references, put(cache.prompts, sample.prompt_embeds), mask
            )
        )
    for entries in cache.kinds:
        entries.refresh(Ranks())
    return cache, keys
