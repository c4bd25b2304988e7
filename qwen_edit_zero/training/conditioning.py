"""Before the transformer exists: read the data sets and have latents and embeddings of every sample in the cache."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from qwen_edit_zero.cluster.collectives import from_rank_0, gather_objects
from qwen_edit_zero.edit_data.cache.entries import EntryKind
from qwen_edit_zero.edit_data.cache.prepared import prepare_sets
from qwen_edit_zero.edit_data.cache.ranks import Ranks
from qwen_edit_zero.edit_data.cache.refusals import as_line
from qwen_edit_zero.edit_data.cache.sets import PreparedSet, SetSpec
from qwen_edit_zero.edit_data.cache.store import ConditioningCache, SampleKey, entry_kind
from qwen_edit_zero.edit_data.instructions.prepare import Instructions, Tally
from qwen_edit_zero.edit_data.manifests.samples import Sample
from qwen_edit_zero.edit_data.manifests.table import SampleTable
from qwen_edit_zero.edit_data.pictures.draws import variant_for
from qwen_edit_zero.edit_model.encoders import ConditioningEncoder, about_latents, about_prompts
from qwen_edit_zero.edit_model.folder import ModelFolder
from qwen_edit_zero.edit_model.sizes import PATCH, VAE_FACTOR
from qwen_edit_zero.errors import DataError
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.training.datasets import MANIFESTS, HeldOutTable, held_out_table, training_table
from qwen_edit_zero.training.leakage import SameIds, leakage
from qwen_edit_zero.training.making import making_held_out, making_of
from qwen_edit_zero.training.progress import LateProgress
from qwen_edit_zero.training.texts import TrainingTexts

_SHOWN = 10  # refused rows of a set that are told


@dataclass(frozen=True)
class TrainingData:
    """The samples to train on, all of whose entries are in the cache."""

    samples: SampleTable
    prepared: PreparedSet
    instructions: Instructions
    seed: int

    @property
    def fingerprint(self) -> str:
        """32 hex digits over what the rows say, their order and their buckets."""
        return self.prepared.fingerprint(self.samples.fingerprint)

    def image_tokens(self) -> npt.NDArray[np.int64]:
        """Tokens of target and references together, of each bucket."""
        tokens: npt.NDArray[np.int64] = self.prepared.buckets.astype(np.int64).prod(-1).sum(-1)
        return tokens // (VAE_FACTOR * PATCH) ** 2

    def key_of(self, index: int, epoch: int, draw: int) -> SampleKey:
        """What is read for a sample at a draw: which variant of its pictures, which of its texts."""
        if self.prepared.variants == 1 and self.prepared.texts_of(index) == 1:
            return self.prepared.key(index)
        name, seed = self.samples[index].id, self.seed
        variant = variant_for(seed=seed, sample_id=name, epoch=epoch, draw=draw, variants=self.prepared.variants)
        text = self.instructions.index(seed, name, epoch, draw, self.prepared.texts_of(index))
        return self.prepared.key(index, variant=variant, text=text)


@dataclass(frozen=True)
class HeldOut:
    """Held-out samples to picture, their entries' keys, and those of the negative prompt with the same references."""

    samples: tuple[Sample, ...]
    keys: tuple[SampleKey, ...]
    negative_keys: tuple[SampleKey, ...]  # empty without guidance


@dataclass(frozen=True)
class ValidationSet:
    """Held-out samples whose loss is computed, cheap ones of a bucket first.

    Attributes:
        ids, categories, keys: n each; no category is "".
        buckets: (n,) bucket of each, as a number.
        available: samples in the whole held-out set.
    """

    ids: tuple[str, ...]
    categories: tuple[str, ...]
    keys: tuple[SampleKey, ...]
    buckets: tuple[int, ...]
    available: int


@dataclass(frozen=True)
class Conditioned:
    """Everything that training needs of the data; pictures and frozen models are not needed any more.

    Attributes:
        validation: None without `validation.every`.
    """

    cache: ConditioningCache
    training: TrainingData
    held_out: HeldOut
    validation: ValidationSet | None = None


def encoder_dtype(settings: Settings, device: torch.device | str) -> torch.dtype:
    """The precision in which the frozen models compute."""
    on_gpu = torch.device(device).type == "cuda"
    return torch.bfloat16 if on_gpu and settings.precision.mode != "fp32" else torch.float32


def entry_kinds(folder: ModelFolder, dtype: torch.dtype) -> tuple[EntryKind, EntryKind]:
    """What the latents and the embeddings of a run are, apart from the samples."""
    latents, prompts = about_latents(folder, dtype=dtype), about_prompts(folder, dtype=dtype)
    return entry_kind("latent", latents), entry_kind("prompt", prompts)


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
    instructions = Instructions(settings.data)
    texts = TrainingTexts(instructions)
    most = settings.data.max_references if folder.variant.takes_several_references else 1
    indexes = cache_folder / MANIFESTS
    tables = [training_table(settings, most, rank=rank, index_folder=indexes, from_rank_0=from_rank_0)]
    held_out = held_out_table(settings, most, rank=rank, index_folder=indexes, from_rank_0=from_rank_0)
    same_ids = SameIds(() if held_out is None else (sample.id for sample in held_out.table))

    def observe(sample: Sample) -> None:
        texts.count(sample)
        same_ids.look_at(sample)

    specs = [SetSpec("train", tables[0], making_of(settings, folder.variant, texts), observe=observe)]
    if held_out is not None:
        tables.append(held_out.table)
        making = making_held_out(settings, folder.variant, instructions, held_out.pictured_ids())
        specs.append(SetSpec("held-out", held_out.table, making, required=False))
    if rank == 0:
        print(tables[0].describe())
    dtype = encoder_dtype(settings, device)
    encoder = ConditioningEncoder(
        folder,
        vae_area=settings.data.vae_area,
        condition_area=settings.data.condition_area,
        device=device,
        dtype=dtype,
        channels_last=settings.gpu.channels_last and device.type == "cuda",
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
            _report(tables, prepared, left_out)
        _tell(ranks.exchange(texts.tally), rank)
        kept = tables[0].take(prepared[0].rows)
        training = TrainingData(kept, prepared[0], instructions, settings.run.seed)
        if held_out is None:
            return Conditioned(cache, training, HeldOut((), (), ()))
        found = same_ids.of_all(ranks.exchange)
        if rank == 0:
            for line in leakage(prepared[0], prepared[1], held_out.table, found):
                print(f"warning: {line}")
        pictured = _held_out(held_out, prepared[1], settings)
        return Conditioned(cache, training, pictured, _validation(held_out, prepared[1], settings))
    except BaseException:
        cache.close()
        raise
    finally:
        encoder.close()


def _held_out(held_out: HeldOutTable, prepared: PreparedSet, settings: Settings) -> HeldOut:
    pictured = [i for i, row in enumerate(prepared.rows.tolist()) if row < held_out.pictured]
    return HeldOut(
        tuple(held_out.table[int(prepared.rows[i])] for i in pictured),
        tuple(prepared.key(i) for i in pictured),
        tuple(prepared.key(i, text=1) for i in pictured) if settings.sampling.guidance > 1 else (),
    )


def _validation(held_out: HeldOutTable, prepared: PreparedSet, settings: Settings) -> ValidationSet | None:
    """Raises DataError if no sample is left."""
    if settings.validation.every is None:
        return None
    positions = np.flatnonzero(held_out.validated[prepared.rows])
    if not len(positions):
        raise DataError(
            f"manifest {held_out.table.name}: validation.every asks for the loss on held-out samples, but none can be "
            "used; name another in data.validation, or leave out validation.every"
        )
    order = np.lexsort((prepared.text_tokens()[positions], prepared.bucket_codes[positions]))
    positions = positions[order]
    samples = [held_out.table[row] for row in prepared.rows[positions].tolist()]
    return ValidationSet(
        tuple(sample.id for sample in samples),
        tuple(sample.category or "" for sample in samples),
        tuple(prepared.key(i)._replace(mask=None) for i in positions.tolist()),
        tuple(prepared.bucket_codes[positions].tolist()),
        held_out.available,
    )


def _tell(tallies: list[Tally], rank: int) -> None:
    """What was done to the instructions, if anything was."""
    total = tallies[0]
    for tally in tallies[1:]:
        total += tally
    if rank == 0 and (total.changed or total.findings or total.withheld or total.refused):
        print("\n".join(total.lines()))


def _report(tables: Sequence[SampleTable], sets: Sequence[PreparedSet], left_out: Path) -> None:
    """Tell the first few rows of each set that are left out, and write all to `left_out`, which always is about the
    last start."""
    left_out.unlink(missing_ok=True)
    told = []
    with left_out.open("w", encoding="utf-8") as out:
        for title, table, prepared in zip(("training set", "held-out set"), tables, sets, strict=False):
            refused = table.refused
            for refusal in refused:
                out.write(json.dumps({"set": title, **as_line(refusal)}, ensure_ascii=False) + "\n")
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
