"""Before the transformer exists: read the data sets and have latents and embeddings of every sample in the cache."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from qwen_edit_zero.cluster.collectives import gather_objects
from qwen_edit_zero.edit_data.batches.buckets import Bucket
from qwen_edit_zero.edit_data.cache.entries import EntryKind
from qwen_edit_zero.edit_data.cache.needs import Making
from qwen_edit_zero.edit_data.cache.prepared import PreparedSet, SetSpec, prepare_sets
from qwen_edit_zero.edit_data.cache.ranks import Ranks
from qwen_edit_zero.edit_data.cache.store import ConditioningCache, SampleKey, entry_kind
from qwen_edit_zero.edit_data.manifests.samples import Sample
from qwen_edit_zero.edit_data.pictures.draws import variant_for
from qwen_edit_zero.edit_data.pictures.prepare import Areas
from qwen_edit_zero.edit_model.encoders import ConditioningEncoder, about_latents, about_prompts
from qwen_edit_zero.edit_model.folder import ModelFolder, Variant
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.training.datasets import DataSet, held_out_set, training_set
from qwen_edit_zero.training.progress import LateProgress

_SHOWN = 10  # refused rows of a set that are told


@dataclass(frozen=True)
class TrainingData:
    """The samples to train on, all of whose entries are in the cache."""

    samples: Sequence[Sample]
    prepared: PreparedSet
    weights: np.ndarray[tuple[int], np.dtype[np.float32]]
    category_codes: np.ndarray[tuple[int], np.dtype[np.int32]]
    categories: tuple[str, ...]
    fingerprint: str
    seed: int

    def buckets(self) -> list[Bucket]:
        """The different buckets, in the order of their codes."""
        pictures = [[(height, width) for width, height in sides if width] for sides in self.prepared.buckets.tolist()]
        return [Bucket(target, tuple(references)) for target, *references in pictures]

    def key_of(self, index: int, epoch: int, draw: int) -> SampleKey:
        """What is read for a sample at a draw: which variant of its pictures, which of its texts."""
        if self.prepared.variants == 1 and self.prepared.texts_of(index) == 1:
            return self.prepared.key(index)
        sample_id = self.samples[index].id
        variant = variant_for(
            seed=self.seed, sample_id=sample_id, epoch=epoch, draw=draw, variants=self.prepared.variants
        )
        return self.prepared.key(index, variant=variant)


@dataclass(frozen=True)
class HeldOut:
    """Held-out samples to picture, their entries' keys, and those of the negative prompt with the same references."""

    samples: tuple[Sample, ...]
    keys: tuple[SampleKey, ...]
    negative_keys: tuple[SampleKey, ...]  # empty without guidance


@dataclass(frozen=True)
class Conditioned:
    """Everything that training needs of the data; pictures and frozen models are not needed any more."""

    cache: ConditioningCache
    training: TrainingData
    held_out: HeldOut


def encoder_dtype(settings: Settings, device: torch.device | str) -> torch.dtype:
    """The precision in which the frozen models compute."""
    on_gpu = torch.device(device).type == "cuda"
    return torch.bfloat16 if on_gpu and settings.precision.mode != "fp32" else torch.float32


def entry_kinds(folder: ModelFolder, dtype: torch.dtype) -> tuple[EntryKind, EntryKind]:
    """What the latents and the embeddings of this model are, apart from the samples."""
    return (
        entry_kind("latent", about_latents(folder, dtype=dtype)),
        entry_kind("prompt", about_prompts(folder, dtype=dtype)),
    )


def areas_of(settings: Settings, folder: ModelFolder) -> Areas:
    """Sizes of what the encoders see: the text encoder of the first variant sees what the VAE sees."""
    data = settings.data
    return Areas(data.vae_area, data.vae_area if folder.variant is Variant.EDIT else data.condition_area)


def making_of(settings: Settings, folder: ModelFolder) -> Making:
    """Which pictures and texts of a training sample are encoded."""
    data = settings.data
    return Making(
        areas=areas_of(settings, folder),
        align=data.align,
        augment=data.augment,
        variants=data.variants,
        seed=settings.run.seed,
    )


def making_held_out(settings: Settings, folder: ModelFolder) -> Making:
    """Of a held-out sample: its instruction, and for guidance the negative prompt with the same references."""
    negative = (settings.sampling.negative_prompt,) if settings.sampling.guidance > 1 else ()
    return Making(
        areas=areas_of(settings, folder),
        align=settings.data.align,
        texts=lambda sample: (sample.instruction, *negative),
    )


def condition(
    settings: Settings,
    folder: ModelFolder,
    *,
    cache_folder: Path,
    work: Path,
    left_out: Path,
    device: torch.device,
    rank: int,
    world_size: int,
) -> Conditioned:
    """Read the manifests and fill the cache; collective. The text encoder and the VAE are each loaded only if entries
    of theirs are missing, and released before this returns. Refused rows are told, and all of them written to
    `left_out` if there are any. The caller closes the cache. Raises DataError, StorageError.

    Args:
        work: a folder of this run alone, for columns about its samples.
    """
    ranks = Ranks(rank, world_size, gather_objects)
    most = settings.data.max_references if folder.variant.takes_several_references else 1
    sets = [training_set(settings, most, ranks=ranks, index_folder=cache_folder)]
    held_out = held_out_set(settings, most, ranks=ranks, index_folder=cache_folder)
    dtype = encoder_dtype(settings, device)
    encoder = ConditioningEncoder(
        folder,
        vae_area=settings.data.vae_area,
        condition_area=settings.data.condition_area,
        device=device,
        dtype=dtype,
        channels_last=settings.gpu.channels_last and device.type == "cuda",
    )
    specs = [SetSpec("train", sets[0].title, sets[0].samples, making_of(settings, folder))]
    if held_out is not None:
        sets.append(held_out)
        specs.append(
            SetSpec("held-out", held_out.title, held_out.samples, making_held_out(settings, folder), required=False)
        )
    cache = ConditioningCache(cache_folder, *entry_kinds(folder, dtype), ranks, work=work)
    try:
        prepared = prepare_sets(
            specs,
            cache,
            encoder,
            references=most,
            on_error=settings.data.on_error,
            new_bar=lambda title, total: LateProgress(title, total, rank=rank),
        )
        if rank == 0:
            _report(
                dict(zip(("training set", "held-out set"), zip(sets, prepared, strict=True), strict=False)), left_out
            )
        return Conditioned(
            cache,
            _training_data(sets[0], prepared[0], settings.run.seed),
            HeldOut((), (), ()) if held_out is None else _held_out(held_out, prepared[1], settings),
        )
    except BaseException:
        cache.close()
        raise
    finally:
        encoder.close()


def _training_data(data: DataSet, prepared: PreparedSet, seed: int) -> TrainingData:
    kept = data.take(prepared.rows)
    return TrainingData(
        kept.samples,
        prepared,
        kept.weights,
        kept.category_codes,
        kept.categories,
        prepared.fingerprint(data.fingerprint),
        seed,
    )


def _held_out(data: DataSet, prepared: PreparedSet, settings: Settings) -> HeldOut:
    return HeldOut(
        tuple(data.samples[int(row)] for row in prepared.rows),
        tuple(prepared.key(i) for i in range(len(prepared))),
        tuple(prepared.key(i, text=1) for i in range(len(prepared))) if settings.sampling.guidance > 1 else (),
    )


def _report(found: Mapping[str, tuple[DataSet, PreparedSet]], left_out: Path) -> None:
    """Tell the first few rows of each set that are left out, and write all to `left_out`, which always is about the
    last start."""
    left_out.unlink(missing_ok=True)
    told = []
    with left_out.open("w", encoding="utf-8") as out:
        for title, (data, prepared) in found.items():
            refused = data.refused
            for refusal in refused:
                line = {"line": refusal.line, "id": refusal.id, "reason": refusal.reason}
                out.write(json.dumps({"set": title, **line}, ensure_ascii=False) + "\n")
            for file in prepared.refused.files:
                with file.open(encoding="utf-8") as lines:
                    for text in lines:
                        out.write(json.dumps({"set": title, **json.loads(text)}, ensure_ascii=False) + "\n")
            count = len(refused) + prepared.refused.count
            first = [*(refused[i] for i in range(min(_SHOWN, len(refused)))), *prepared.refused.first][:_SHOWN]
            told += [f"left out of the {title}: {refusal}" for refusal in first]
            if count > _SHOWN:
                told.append(f"left out of the {title}: {count - _SHOWN} more rows; all are in {left_out}")
        empty = out.tell() == 0
    if empty:
        with suppress(OSError):
            left_out.unlink()
    for line_ in told:
        print(line_)
