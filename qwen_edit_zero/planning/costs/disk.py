"""What a run leaves on disks: checkpoints, and the cache of latents and embeddings."""

from __future__ import annotations

import math
from dataclasses import dataclass

from qwen_edit_zero.planning.jobs.job import Job
from qwen_edit_zero.settings.models import CheckpointSettings

_LATENT_CHANNELS = 16
_CELLS_A_TOKEN = 4  # a token is 2 x 2 cells of the latent
_RECORD, _INDEX = 64, 84  # bytes of an entry beside its shard, and in the sorted table of all keys
_SHARD_BYTES, _HEADER_ROOM = 256 * 1024**2, 256 * 1024
_FP32 = 4
MOMENTS = 2


@dataclass(frozen=True)
class CacheSize:
    """Of the cache of one data set whose samples share nothing.

    Attributes:
        sample: bytes of a sample's entries, which are what a rank reads to train on it.
        total: bytes of all files; None if the number of samples is not known.
    """

    sample: int
    total: int | None


def checkpoint_bytes(job: Job) -> int:
    """Of one checkpoint: weights that train, both moments and the running average in fp32; frozen ones if wanted.

    Moments of `adamw_8bit` are fp32 there, too. The manifest and the table of ranges are left out (1/1000).
    """
    settings = job.settings
    kinds = 1 + MOMENTS + (settings.optimizer.ema is not None)
    frozen = job.frozen_elements * job.compute_bytes if settings.checkpoint.frozen == "full" else 0
    return _FP32 * kinds * job.trained_elements + frozen


def checkpoints_kept(settings: CheckpointSettings, steps: int) -> int:
    """How many checkpoints lie there at the end of a run of so many steps, and the one being written beside them."""
    written = math.ceil(steps / settings.every) if settings.every else 1
    if settings.keep is None:
        return written
    for_ever = steps // settings.keep_every if settings.keep_every else 0
    return min(written, settings.keep + for_ever + (settings.keep_best or 0)) + (written > settings.keep)


def cache_size(job: Job, samples: int | None = None) -> CacheSize:
    """Of the cache that `job` trains from.

    Each of `data.variants` has a latent of the target and of each reference, and an embedding of each text: one, and
    one of "" with `data.caption_dropout`. Paraphrases are not known here; each is one embedding more.
    """
    data, shape = job.settings.data, job.sample
    element = _FP32 if job.settings.precision.mode == "fp32" or job.settings.engine.device == "cpu" else 2
    latents = shape.image_tokens * _CELLS_A_TOKEN * _LATENT_CHANNELS * element
    texts = 1 + (data.caption_dropout > 0)
    prompt = shape.text_tokens * job.model.text_width * element
    entries = 1 + len(shape.references) + texts
    sample = latents + texts * prompt
    if samples is None:
        return CacheSize(sample, None)
    copies = samples * data.variants
    tensors = copies * latents, copies * texts * prompt
    headers = sum(math.ceil(size / _SHARD_BYTES) * _HEADER_ROOM for size in tensors)
    return CacheSize(sample, sum(tensors) + headers + copies * entries * (_RECORD + _INDEX))
