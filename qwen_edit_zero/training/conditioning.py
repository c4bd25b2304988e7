"""Before the transformer exists: read the data sets and have latents and embeddings of every sample in the cache."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from PIL import Image

from qwen_edit_zero.assets import demo_manifest
from qwen_edit_zero.cluster.collectives import gather_objects
from qwen_edit_zero.edit_data.batches.buckets import Bucket, assign_buckets
from qwen_edit_zero.edit_data.cache.fill import FilledCache, fill_cache
from qwen_edit_zero.edit_data.cache.store import CachedSample, ConditioningCache
from qwen_edit_zero.edit_data.manifests.manifest import Refusal, Sample, read_manifest, refuse_or_raise
from qwen_edit_zero.edit_model.encoders import ConditioningEncoder
from qwen_edit_zero.edit_model.folder import ModelFolder
from qwen_edit_zero.settings.models import DataSettings, Settings
from qwen_edit_zero.training.progress import Progress

DEMO = "demo"
_SHOWN = 10  # refused rows of a set that are told


@dataclass(frozen=True)
class TrainingData:
    """Samples that have a cache entry, their entries' keys and their buckets, all in the same order."""

    samples: tuple[Sample, ...]
    keys: tuple[str, ...]
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True)
class HeldOut:
    """Held-out samples to picture, their entries' keys, and those of the negative prompt with the same references."""

    samples: tuple[Sample, ...]
    keys: tuple[str, ...]
    negative_keys: tuple[str, ...]  # empty without guidance


@dataclass(frozen=True)
class Conditioned:
    """Everything that training needs of the data; pictures and frozen models are not needed any more."""

    cache: ConditioningCache
    training: TrainingData
    held_out: HeldOut


def condition(
    settings: Settings,
    folder: ModelFolder,
    *,
    cache_folder: Path,
    left_out: Path,
    device: torch.device,
    rank: int,
    world_size: int,
) -> Conditioned:
    """Read the manifests and fill the cache; collective. The text encoder and the VAE are loaded only if entries are
    missing, and released before this returns. Refused rows are told, and all of them written to `left_out` if there
    are any. Raises DataError."""
    data = settings.data
    path = _manifest_path(data.manifest, "train")
    several = folder.variant.takes_several_references
    most = data.max_references if several else 1
    manifest = read_manifest(path, max_references=most, on_error=data.on_error)
    bucketed = assign_buckets(manifest.samples[: data.max_samples], vae_area=data.vae_area)
    refuse_or_raise(bucketed.refused, left=len(bucketed.samples), path=path, on_error=data.on_error)
    held_out, refused_held_out = _held_out_samples(data, count=settings.sampling.count, most_references=most)
    negative = (
        tuple(replace(s, id=f"{s.id} (negative)", instruction=settings.sampling.negative_prompt) for s in held_out)
        if settings.sampling.guidance > 1
        else ()
    )

    encoder = ConditioningEncoder(
        folder,
        vae_area=data.vae_area,
        condition_area=data.condition_area,
        device=device,
        dtype=torch.bfloat16 if device.type == "cuda" and settings.precision.mode != "fp32" else torch.float32,
        channels_last=settings.gpu.channels_last and device.type == "cuda",
    )
    cache = ConditioningCache(cache_folder, encoder.fingerprint)
    try:
        filled = _fill(bucketed.samples, cache, encoder, data, rank, world_size, "training set")
        refuse_or_raise(filled.refused, left=len(filled.samples), path=path, on_error=data.on_error)
        shown = _fill((*held_out, *negative), cache, encoder, data, rank, world_size, "held-out set")
    finally:
        encoder.close()
    if rank == 0:
        _report(
            {
                "training set": [*manifest.refused, *bucketed.refused, *filled.refused],
                "held-out set": [*refused_held_out, *shown.refused],
            },
            left_out,
        )
    bucket_of = dict(zip((s.id for s in bucketed.samples), bucketed.buckets, strict=True))
    key_of = dict(zip((s.id for s in shown.samples), shown.keys, strict=True))
    kept = tuple(s for s in held_out if s.id in key_of and (not negative or f"{s.id} (negative)" in key_of))
    return Conditioned(
        cache,
        TrainingData(filled.samples, filled.keys, tuple(bucket_of[s.id] for s in filled.samples)),
        HeldOut(
            kept,
            tuple(key_of[s.id] for s in kept),
            tuple(key_of[f"{s.id} (negative)"] for s in kept) if negative else (),
        ),
    )


def _manifest_path(name: str, split: str) -> Path:
    return demo_manifest("train" if split == "train" else "validation") if name == DEMO else Path(name).expanduser()


def _held_out_samples(
    data: DataSettings, *, count: int, most_references: int
) -> tuple[tuple[Sample, ...], tuple[Refusal, ...]]:
    """The first of every category, then the second of every category ..., `count` in all; and the rows refused."""
    name = data.validation or (DEMO if data.manifest == DEMO else None)
    if name is None or count == 0:
        return (), ()
    path = _manifest_path(name, "validation")
    manifest = read_manifest(path, max_references=most_references, on_error=data.on_error)
    turn: dict[str | None, int] = {}
    order = []
    for position, sample in enumerate(manifest.samples):
        turn[sample.category] = turn.get(sample.category, -1) + 1
        order.append((turn[sample.category], position))
    return tuple(manifest.samples[position] for _, position in sorted(order)[:count]), manifest.refused


def _fill(
    samples: Sequence[Sample],
    cache: ConditioningCache,
    encoder: ConditioningEncoder,
    data: DataSettings,
    rank: int,
    world_size: int,
    title: str,
) -> FilledCache:
    def encode(references: Sequence[Image.Image], instruction: str, target: Image.Image) -> CachedSample:
        made = encoder.encode(references, instruction, target)
        assert made.target_latent is not None
        return CachedSample(made.target_latent, made.reference_latents, made.prompt_embeds)

    progress: dict[str, Progress] = {}

    def on_progress(phase: str, done: int, total: int) -> None:
        if phase != "encode" or total == 0:
            return
        if phase not in progress:
            progress[phase] = Progress(f"encoding the {title}", total, rank=rank, min_seconds=5.0)
        if done:
            progress[phase].advance()

    try:
        return fill_cache(
            samples,
            cache,
            encode,
            rank=rank,
            world_size=world_size,
            exchange=gather_objects,
            on_error=data.on_error,
            on_progress=on_progress,
        )
    finally:
        for bar in progress.values():
            bar.close()


def _report(refused: Mapping[str, Sequence[Refusal]], left_out: Path) -> None:
    """Tell the first few of each set and write all to `left_out`, which always is about the last start."""
    left_out.unlink(missing_ok=True)
    lines = [
        {"set": title, "line": refusal.line, "id": refusal.id, "reason": refusal.reason}
        for title, found in refused.items()
        for refusal in found
    ]
    if lines:
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        left_out.write_text(text, encoding="utf-8")
    for title, found in refused.items():
        for refusal in found[:_SHOWN]:
            print(f"left out of the {title}: {refusal}")
        if len(found) > _SHOWN:
            print(f"left out of the {title}: {len(found) - _SHOWN} more rows; all are in {left_out}")
