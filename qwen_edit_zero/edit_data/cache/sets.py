"""Sets of samples: what is wanted, what it needs, and what it is when all of it is in the cache."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash

from qwen_edit_zero.edit_data.cache.columns import Column
from qwen_edit_zero.edit_data.cache.needs import Making
from qwen_edit_zero.edit_data.cache.refusals import Refused
from qwen_edit_zero.edit_data.cache.store import SampleKey
from qwen_edit_zero.edit_data.manifests.samples import Refusal, Sample
from qwen_edit_zero.edit_data.manifests.table import SampleTable

_CHUNK = 1 << 18  # rows whose columns are looked at together


@dataclass(frozen=True)
class SetSpec:
    """A table whose samples are wanted.

    Attributes:
        name: of its columns; unique among the sets.
        required: whether it is an error if no sample is left.
        observe: is given every sample, once, by the rank that looks at it.
    """

    name: str
    table: SampleTable
    making: Making
    required: bool = True
    observe: Callable[[Sample], None] | None = None

    @property
    def title(self) -> str:
        """For messages."""
        return f"manifest {self.table.name}"

    def refusal(self, sample: Sample, reason: str) -> Refusal:
        """That this sample is left out."""
        return Refusal(sample.line, sample.id, reason, self.table.where(sample.line))


@dataclass(frozen=True)
class PreparedSet:
    """Samples all of whose entries are in the cache; columns are memory-mapped, and the same on every rank.

    Attributes:
        rows: (n,) int64, numbers of the samples in their table.
        latents: (n, variants, 1 + references, 16), keys; zeros where a sample has fewer references.
        masks: (n, variants, 16), keys; zeros for samples without.
        prompts: (m, 16), keys: sample after sample, variant after variant, text after text.
        prompt_ends: (n,) int64, where each sample's prompts end.
        prompt_tokens: (m,) int32, length of each embedding.
        bucket_codes: (n,) int32, positions in `buckets`.
        buckets: (b, 1 + references, 2) int32, (width, height) of target and references, 0 for none; sorted.
        refused: rows that are left out.
        made: entries computed now, by all ranks, for all sets.
    """

    rows: Column
    latents: Column
    masks: Column
    prompts: Column
    prompt_ends: Column
    prompt_tokens: Column
    bucket_codes: Column
    buckets: npt.NDArray[np.int32]
    refused: Refused
    made: int

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def variants(self) -> int:
        """Versions of each sample's pictures."""
        return int(self.latents.shape[1])

    def texts_of(self, index: int) -> int:
        """How many texts a sample has."""
        return (int(self.prompt_ends[index]) - self._first_prompt(index)) // self.variants

    def key(self, index: int, *, variant: int = 0, text: int = 0) -> SampleKey:
        """The entries of a sample in one of its variants, with one of its texts."""
        latents = self.latents[index, variant]
        mask = self.masks[index, variant]
        prompt = self.prompts[self._first_prompt(index) + variant * self.texts_of(index) + text]
        return SampleKey(
            latents[0].tobytes(),
            tuple(latent.tobytes() for latent in latents[1:] if latent.any()),
            prompt.tobytes(),
            mask.tobytes() if mask.any() else None,
        )

    def text_tokens(self) -> npt.NDArray[np.int32]:
        """(n,) length of each sample's first text's embedding."""
        first = np.zeros(len(self), np.int64)
        first[1:] = self.prompt_ends[:-1]
        return np.asarray(self.prompt_tokens[first])

    def fingerprint(self, table: str) -> str:
        """32 hex digits over which samples there are, in which order and buckets.

        Args:
            table: fingerprint of the table's rows.
        """
        digest = hashlib.blake2b(table.encode(), digest_size=16)
        digest.update(np.ascontiguousarray(self.buckets).data)
        for column in (self.rows, self.bucket_codes):
            for start in range(0, len(column), _CHUNK):
                digest.update(np.ascontiguousarray(column[start : start + _CHUNK]).data)
        return digest.hexdigest()

    def content(self) -> str:
        """32 hex digits over what the samples show and say as it is prepared: pictures, masks, texts, variants."""
        digest = xxhash.xxh3_128()
        for column in (self.latents, self.masks, self.prompts, self.prompt_ends):
            for start in range(0, len(column), _CHUNK):
                digest.update(np.ascontiguousarray(column[start : start + _CHUNK]).data)
        return digest.hexdigest()

    def _first_prompt(self, index: int) -> int:
        return int(self.prompt_ends[index - 1]) if index else 0


@dataclass(frozen=True)
class Needed:
    """What a set needs, whether it is there or not.

    Attributes:
        latents, masks, prompts: (m, 16) keys; some may be zeros, some there several times.
        prepared: (n, 1 + references, 2) of each row, (width, height), 0 for none.
        refused: rows that need nothing, because they cannot be used.
        unread: rows of which a picture would have to be read to know what they need.
    """

    latents: Column
    masks: Column
    prompts: Column
    prepared: Column
    refused: Refused
    unread: int
