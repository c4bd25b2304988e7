"""The loss on held-out samples: the same noise at the same noise levels every time, so that curves can be compared.

Each sample is looked at with `sigmas` levels of noise, one drawn from each of as many equal parts of (0, 1), and noise
of its own at each. Both are functions of (validation.seed, the sample's id, which part) alone: not of how training
draws its levels, nor of rank, engine or micro-batch. The loss is the plain mean square error of the velocity, without
weights of samples, masks or noise levels. Levels spread evenly also tell early noise from late, which a mean over few
random ones cannot.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch

from qwen_edit_zero.cluster.collectives import sum_over_ranks
from qwen_edit_zero.edit_data.batches.batch import EditBatch, collate
from qwen_edit_zero.edit_data.cache.store import CachedSample, SampleKey
from qwen_edit_zero.edit_model.flow import FlowDraw, sample_generator
from qwen_edit_zero.edit_model.loss import flow_losses
from qwen_edit_zero.engines.base import ParallelEngine
from qwen_edit_zero.settings.models import ValidationSettings
from qwen_edit_zero.training.conditioning import ValidationSet
from qwen_edit_zero.training.held_out_records import HELD_OUT

QUARTERS = ("0-0.25", "0.25-0.5", "0.5-0.75", "0.75-1")  # of the noise level
_EDGE = 2.0**-24  # sigma stays this far inside (0, 1), so that it does in fp32 too


class Entries(Protocol):
    """Where latents and embeddings lie."""

    def get(self, key: SampleKey, /) -> CachedSample:
        """Raises DataError if an entry is gone or damaged."""
        ...


class Bar(Protocol):
    """Shows how far the work is."""

    def advance(self, units: int = 1, text: str = "") -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class HeldOutLoss:
    """Means over held-out samples and noise levels; NaN where a loss was not finite.

    Attributes:
        loss: over all of them.
        by_sigma: over those in each quarter of the noise levels (`QUARTERS`); quarters without any are left out.
        by_category: over the samples of each category, if there is more than one; "" is none.
        samples: how many there are.
        seconds: that computing took.
        bad: ids of the samples whose loss was not finite.
    """

    loss: float
    by_sigma: Mapping[str, float]
    by_category: Mapping[str, float]
    samples: int
    seconds: float
    bad: tuple[str, ...] = ()


@dataclass(frozen=True)
class Item:
    """One sample at one noise level, by numbers."""

    sample: int
    part: int


class HeldOutMeasure:
    """Computes the loss on held-out samples under any engine. The result is the same on every rank.

    Args:
        samples: those of one bucket must be neighbours.
        micro_size: samples and noise levels of one forward of one rank.
    """

    def __init__(
        self,
        engine: ParallelEngine,
        entries: Entries,
        samples: ValidationSet,
        settings: ValidationSettings,
        *,
        micro_size: int,
        new_bar: Callable[[str, int], Bar],
    ) -> None:
        self._engine, self._entries, self._samples, self._settings = engine, entries, samples, settings
        self._new_bar = new_bar
        self._batches = micro_batches(samples.buckets, settings.sigmas, micro_size)
        self._levels = torch.tensor(
            [
                [fixed_sigma(settings, name, part)[0] for part in range(settings.sigmas)]
                for name in samples.ids
            ],
            dtype=torch.float64,
        )  # fmt: skip

    @property
    def fingerprint(self) -> str:
        """16 hex digits over all that decides which losses can be compared, but for the model."""
        settings, samples = self._settings, self._samples
        digest = hashlib.blake2b(f"{settings.seed} {settings.sigmas} {settings.weights}".encode(), digest_size=8)
        for name, key in sorted(zip(samples.ids, samples.keys, strict=True)):
            digest.update(b"\0".join([name.encode(), key.target, *key.references, key.prompt]))
        return digest.hexdigest()

    def describe(self) -> str:
        """What is looked at, in words."""
        count, available = len(self._samples.ids), self._samples.available
        of = f"{count:,}" if count == available else f"{count:,} of {available:,}"
        levels = self._settings.sigmas
        return (
            f"{of} held-out samples at {levels} noise level{'' if levels == 1 else 's'} each"
            f"{', with averaged weights' if self._settings.weights == 'ema' else ''}"
        )

    def compute(self) -> HeldOutLoss:
        """Collective, between steps; leaves no trace in what is trained. Raises DataError.

        Micro-batches are dealt out to the ranks, or groups of ranks that split sequences. One without any in a round
        repeats the last: sharded engines need the same number of forwards everywhere.
        """
        began = time.monotonic()
        engine, losses = self._engine, torch.zeros(len(self._samples.ids), self._settings.sigmas, dtype=torch.float64)
        mine: list[tuple[Sequence[Item], torch.Tensor]] = []
        averaged = engine.averaged() if self._settings.weights == "ema" else nullcontext()
        rounds = range(0, len(self._batches), engine.dp_size)
        bar = self._new_bar("held-out loss", len(rounds))
        try:
            with averaged, engine.eval_mode():
                for first in rounds:
                    number = first + engine.dp_rank
                    items = self._batches[min(number, len(self._batches) - 1)]
                    found = self._losses(items)
                    if number < len(self._batches) and engine.ranks.sequence_rank == 0:
                        mine.append((items, found))
                    bar.advance()
        finally:
            bar.close()
        for done, values in mine:
            losses[[item.sample for item in done], [item.part for item in done]] = values.double().cpu()
        # Every loss to every rank, in one collective: then all add them in one order, whoever computed which.
        losses = sum_over_ranks(losses, engine.device)
        return self._summed_up(losses, time.monotonic() - began)

    def _losses(self, items: Sequence[Item]) -> torch.Tensor:
        """(B,) fp32, on the engine's device."""
        batch, draw = self._batch(items)
        device = self._engine.device
        batch = batch.to(device)
        return flow_losses(
            self._engine.forward,
            target_latents=batch.target_latents,
            reference_latents=batch.reference_latents,
            prompt_embeds=batch.prompt_embeds,
            prompt_mask=batch.prompt_mask,
            draw=draw.to(device),
        )

    def _batch(self, items: Sequence[Item]) -> tuple[EditBatch, FlowDraw]:
        samples = self._samples
        entries = {number: self._entries.get(samples.keys[number]) for number in {item.sample for item in items}}
        ids = [samples.ids[item.sample] for item in items]
        batch = collate([entries[i.sample] for i in items], weights=[1.0] * len(items), sample_ids=ids, epoch=0)
        shape = tuple(batch.target_latents.shape[1:])
        return batch, fixed_draw(self._settings, [(samples.ids[i.sample], i.part) for i in items], shape)

    def _summed_up(self, losses: torch.Tensor, seconds: float) -> HeldOutLoss:
        """Means of (n, sigmas) losses."""
        quarter = (self._levels * 4).long()
        categories = self._samples.categories
        by_category: dict[str, list[int]] = {}
        for i, name in enumerate(categories):
            by_category.setdefault(name, []).append(i)
        bad = (~losses.isfinite()).any(1)
        return HeldOutLoss(
            loss=losses.mean().item(),
            by_sigma={
                name: losses[quarter == q].mean().item() for q, name in enumerate(QUARTERS) if (quarter == q).any()
            },
            by_category={name: losses[rows].mean().item() for name, rows in sorted(by_category.items())}
            if len(by_category) > 1
            else {},
            samples=len(categories),
            seconds=seconds,
            bad=tuple(name for name, is_bad in zip(self._samples.ids, bad.tolist(), strict=True) if is_bad),
        )


def micro_batches(buckets: Sequence[int], parts: int, micro_size: int) -> list[list[Item]]:
    """Samples at each of `parts` noise levels, in order, in micro-batches of one bucket each."""
    batches = []
    for _, numbers in groupby(range(len(buckets)), key=lambda number: buckets[number]):
        items = [Item(number, part) for number in numbers for part in range(parts)]
        batches += [items[i : i + micro_size] for i in range(0, len(items), micro_size)]
    return batches


def fixed_sigma(settings: ValidationSettings, sample_id: str, part: int) -> tuple[float, torch.Generator]:
    """A sample's noise level in part `part` of (0, 1), uniform in it, and the generator that noise comes from next."""
    generator = sample_generator(settings.seed, sample_id, 0, "validation", draw=part)
    sigma = (part + torch.rand((), dtype=torch.float64, generator=generator).item()) / settings.sigmas
    return min(max(sigma, _EDGE), 1 - _EDGE), generator


def fixed_draw(
    settings: ValidationSettings, items: Sequence[tuple[str, int]], latent_shape: tuple[int, ...]
) -> FlowDraw:
    """Noise and noise level of (sample id, part) pairs, on CPU; all weigh 1. `latent_shape` is (16, h, w)."""
    noise, sigmas = [], []
    for sample_id, part in items:
        sigma, generator = fixed_sigma(settings, sample_id, part)
        sigmas.append(sigma)
        noise.append(torch.randn(latent_shape, generator=generator))
    sigma_tensor = torch.tensor(sigmas, dtype=torch.float32)
    return FlowDraw(torch.stack(noise), sigma_tensor, torch.ones_like(sigma_tensor))


def to_record(found: HeldOutLoss, *, step: int, set_name: str) -> dict[str, Any]:
    """What `metrics.jsonl` says of a value; `set_name` is that of what was looked at."""
    return {
        "step": step,
        HELD_OUT: found.loss,
        "held_out_by_sigma": dict(found.by_sigma),
        "held_out_by_category": dict(found.by_category),
        "held_out_samples": found.samples,
        "held_out_seconds": found.seconds,
        "held_out_set": set_name,
    }
