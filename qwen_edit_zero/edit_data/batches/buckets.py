"""Compound buckets: samples whose target and ordered references have the same sizes, so that they can share a batch.

The transformer takes its rotary positions from the first sample of a batch, so all of a batch must have one grid.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from qwen_edit_zero.edit_data.manifests.samples import Refusal, Sample
from qwen_edit_zero.edit_data.pictures.decode import picture_size
from qwen_edit_zero.edit_data.storage.files import PictureFile
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError

MULTIPLE = 32  # sides of a prepared picture: 8 by the VAE, 2 by the packing of latents, 2 to spare as in the pipeline
VAE_SCALE = 8

SizeOf = Callable[[PictureFile], tuple[int, int]]


class Bucket(NamedTuple):
    """(height, width) in pixels, after resizing, of a sample's target and of its references in order."""

    target: tuple[int, int]
    references: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return " + ".join(f"{width}x{height}" for height, width in (self.target, *self.references))

    @property
    def target_latent(self) -> tuple[int, int]:
        """(height, width) of the target's latent."""
        return self.target[0] // VAE_SCALE, self.target[1] // VAE_SCALE

    @property
    def reference_latents(self) -> tuple[tuple[int, int], ...]:
        """(height, width) of the references' latents, in order."""
        return tuple((height // VAE_SCALE, width // VAE_SCALE) for height, width in self.references)

    @property
    def image_tokens(self) -> int:
        """Tokens of target and references together; one is 16 x 16 pixels."""
        return sum(height * width for height, width in (self.target, *self.references)) // (2 * VAE_SCALE) ** 2


class Bucketed(NamedTuple):
    """Samples that have a bucket, their buckets at the same index, and those refused for a picture's header."""

    samples: tuple[Sample, ...]
    buckets: tuple[Bucket, ...]
    refused: tuple[Refusal, ...]


def prepared_size(width: int, height: int, *, area: int) -> tuple[int, int]:
    """(height, width) in pixels to which a picture of this size is resized for a wanted area.

    The rule is `calculate_dimensions` of diffusers' `pipeline_qwenimage_edit_plus`: with r = width / height,
    w = sqrt(area * r) and h = w / r, each rounded to the nearest multiple of 32.
    """
    ratio = width / height
    wanted_width = math.sqrt(area * ratio)
    wanted_height = wanted_width / ratio
    return round(wanted_height / MULTIPLE) * MULTIPLE, round(wanted_width / MULTIPLE) * MULTIPLE


def bucket_of(sample: Sample, *, vae_area: int, size_of: SizeOf = picture_size) -> Bucket:
    """The bucket of a sample, from its pictures' headers.

    Args:
        vae_area: pixels of a picture prepared for the VAE.
        size_of: upright (width, height) in pixels of a picture file.

    Raises:
        DataError: a header cannot be read, or the picture is so long that it would be resized to nothing.
    """

    def prepared(file: PictureFile) -> tuple[int, int]:
        width, height = size_of(file)
        size = prepared_size(width, height, area=vae_area)
        if 0 in size:
            raise DataError(
                f"picture {shown(file.name)}: it is {width} x {height} pixels, so long that at an area of {vae_area:,} "
                f"pixels (data.vae_area) it would be resized to {size[1]} x {size[0]}; crop it"
            )
        return size

    return Bucket(prepared(sample.target), tuple(prepared(file) for file in sample.sources))


def assign_buckets(samples: Sequence[Sample], *, vae_area: int, threads: int = 8) -> Bucketed:
    """Buckets of all samples, headers read by several threads at once; order kept.

    Samples of which a header is refused are left out and listed (see `refuse_or_raise`).
    """

    def attempt(sample: Sample) -> Bucket | Refusal:
        try:
            return bucket_of(sample, vae_area=vae_area)
        except DataError as error:
            return Refusal(sample.line, sample.id, str(error))

    with ThreadPoolExecutor(threads, thread_name_prefix="headers") as pool:
        results = list(pool.map(attempt, samples, chunksize=64))
    kept = [(s, r) for s, r in zip(samples, results, strict=True) if isinstance(r, Bucket)]
    shared: dict[Bucket, Bucket] = {}  # equal buckets become one object: millions of samples have few of them
    return Bucketed(
        tuple(sample for sample, _ in kept),
        tuple(shared.setdefault(bucket, bucket) for _, bucket in kept),
        tuple(r for r in results if isinstance(r, Refusal)),
    )
