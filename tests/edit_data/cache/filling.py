"""Filling a cache in tests: stand-ins for the frozen models, and ranks that are threads."""

from __future__ import annotations

import os
import pickle
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from qwen_edit_zero.edit_data.cache.needs import Making
from qwen_edit_zero.edit_data.cache.prepared import prepare_sets
from qwen_edit_zero.edit_data.cache.ranks import Ranks
from qwen_edit_zero.edit_data.cache.sets import PreparedSet, SetSpec
from qwen_edit_zero.edit_data.cache.store import CachedSample, ConditioningCache, entry_kind
from qwen_edit_zero.edit_data.manifests.opening import open_manifest
from qwen_edit_zero.edit_data.manifests.table import SampleTable
from qwen_edit_zero.edit_data.pictures.prepare import Areas
from qwen_edit_zero.errors import DataError

AREAS = Areas(vae=64 * 64, condition=32 * 32)
VAE, TEXT_ENCODER = {"vae": "one"}, {"text_encoder": "one"}


class Encoders:
    """What they make is a function of the pictures and the text; they note what they were asked."""

    def __init__(self, refuse: Callable[[str], bool] = lambda text: False) -> None:
        self.prompts: list[str] = []
        self.latents = 0
        self._refuse = refuse

    def latent(self, picture: Image.Image) -> torch.Tensor:
        self.latents += 1
        small = np.array(picture.resize((picture.width // 8, picture.height // 8)))
        return torch.from_numpy(small).float().mean(-1).expand(16, *small.shape[:2]).contiguous()

    def prompt(self, references: Sequence[Image.Image], instruction: str) -> torch.Tensor:
        self.prompts.append(instruction)
        mean = sum((i + 1) * float(np.array(r).mean()) for i, r in enumerate(references))
        return torch.full((1 + len(instruction), 4), mean + len(instruction))

    def check_instruction(self, instruction: str) -> None:
        if self._refuse(instruction):
            raise DataError(f"the instruction {instruction!r} is too long")

    def latent_bytes(self, width: int, height: int) -> int:
        return 16 * width * height // 64 * 4

    def prompt_bytes(self, references: Sequence[tuple[int, int]], instruction: str) -> int:
        return (1 + len(instruction)) * 16

    def release(self) -> None:
        pass


class NoBar:
    def __init__(self, title: str, total: int) -> None:
        pass

    def advance(self, units: int = 1) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass
class Filled:
    """What filling came to, and what the encoders of each rank were asked."""

    set: PreparedSet
    encoders: list[Encoders]
    table: SampleTable
    samples: list[CachedSample] = field(default_factory=list)

    @property
    def ids(self) -> list[str]:
        return [self.table[int(row)].id for row in self.set.rows]

    @property
    def prompts(self) -> list[str]:
        return sorted(text for encoder in self.encoders for text in encoder.prompts)

    @property
    def latents(self) -> int:
        return sum(encoder.latents for encoder in self.encoders)


def fill(
    manifest: Path,
    folder: Path,
    *,
    ranks: int = 1,
    making: Making | None = None,
    vae: dict[str, object] = VAE,
    text_encoder: dict[str, object] = TEXT_ENCODER,
    on_error: Any = "stop",
    new_encoders: Callable[[], Any] = Encoders,
) -> Filled:
    """Fill `folder` with what a manifest needs, one thread a rank; asserts that all ranks come to the same."""
    barrier = threading.Barrier(ranks)
    box: list[Any] = [None] * ranks
    encoders = [new_encoders() for _ in range(ranks)]
    table = open_manifest(manifest, on_error=on_error, index_folder=folder / "manifests")
    results: list[PreparedSet | None] = [None] * ranks
    samples: list[list[CachedSample]] = [[] for _ in range(ranks)]

    def rank(number: int) -> None:
        def exchange(mine: Any) -> list[Any]:
            box[number] = pickle.dumps(mine)
            barrier.wait(30)
            everyone = [pickle.loads(part) for part in box]
            barrier.wait(30)
            return everyone

        kinds = entry_kind("latent", vae), entry_kind("prompt", text_encoder)
        cache = ConditioningCache(folder, *kinds, Ranks(number, ranks, exchange), work=folder / f"work-{os.getpid()}")
        try:
            spec = SetSpec("train", table, making or Making(AREAS))
            (found,) = prepare_sets([spec], cache, encoders[number], references=3, on_error=on_error, new_bar=NoBar)
            results[number] = found
            samples[number] = [copied(cache.get(found.key(i))) for i in range(len(found))]
        except BaseException:
            barrier.abort()
            raise
        finally:
            if barrier.broken or ranks == 1:
                cache.close()
            else:
                exchange(None)
                cache.close()

    if ranks == 1:
        rank(0)
    else:
        with ThreadPoolExecutor(ranks) as pool:
            futures = [pool.submit(rank, number) for number in range(ranks)]
        errors = [future.exception() for future in futures]
        for error in sorted(filter(None, errors), key=lambda e: isinstance(e, threading.BrokenBarrierError)):
            raise error
    first = results[0]
    assert first is not None
    assert all(same(first, result) for result in results)
    return Filled(first, encoders, table, samples[0])


def copied(sample: CachedSample) -> CachedSample:
    """Apart from the mapped file, which tests damage."""
    return CachedSample(
        sample.target_latent.clone(),
        tuple(t.clone() for t in sample.reference_latents),
        sample.prompt_embeds.clone(),
        None if sample.mask is None else sample.mask.clone(),
    )


def same(one: PreparedSet, other: PreparedSet | None) -> bool:
    """Whether two sets have the same columns."""
    assert other is not None
    names = ("rows", "latents", "masks", "prompts", "prompt_ends", "prompt_tokens", "bucket_codes", "buckets")
    equal = all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)
    return equal and (one.refused.count, one.refused.first) == (other.refused.count, other.refused.first)


def equal_samples(one: CachedSample, other: CachedSample) -> bool:
    """Bit for bit."""
    pairs = [(one.target_latent, other.target_latent), (one.prompt_embeds, other.prompt_embeds)]
    pairs += list(zip(one.reference_latents, other.reference_latents, strict=True))
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)
