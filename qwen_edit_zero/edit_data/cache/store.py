"""The cache folder as a whole: what the frozen encoders made of pictures and instructions, kept by content.

CACHE/latent-FINGERPRINT/    latents of prepared pictures      (`entries`)
      prompt-FINGERPRINT/    embeddings of instructions with their references
      mask-FINGERPRINT/      masks on the grid of latents
      facts/                 digests and sizes of picture files (`facts`)
      .in-use                locked by those who use it         (`locks`)
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from qwen_edit_zero.edit_data.cache.columns import Columns
from qwen_edit_zero.edit_data.cache.entries import Entries, EntryKind, Kind
from qwen_edit_zero.edit_data.cache.facts import Facts
from qwen_edit_zero.edit_data.cache.locks import CacheLock
from qwen_edit_zero.edit_data.cache.ranks import Ranks
from qwen_edit_zero.edit_data.cache.verdicts import Verdicts
from qwen_edit_zero.edit_data.pictures.decode import RULES_VERSION
from qwen_edit_zero.edit_data.wording import byte_count, shown
from qwen_edit_zero.errors import StorageError

_FORMAT = 1  # part of every fingerprint, so that entries of another format are not found


@dataclass(frozen=True, slots=True)
class CachedSample:
    """What training needs of a sample, on the CPU.

    Attributes:
        target_latent: (16, h / 8, w / 8), normalised.
        reference_latents: (16, h_i / 8, w_i / 8) each, in the sample's order.
        prompt_embeds: (L, D), without padding.
        mask: (h / 8, w / 8), uint8, 255 where the edit is; None if the sample has none.
    """

    target_latent: torch.Tensor
    reference_latents: tuple[torch.Tensor, ...]
    prompt_embeds: torch.Tensor
    mask: torch.Tensor | None = None


class SampleKey(NamedTuple):
    """The entries that make a sample: 16 bytes each."""

    target: bytes
    references: tuple[bytes, ...]
    prompt: bytes
    mask: bytes | None = None


def entry_kind(kind: Kind, about: Mapping[str, object]) -> EntryKind:
    """A kind of entries; `about` is everything but content that decides their values, and becomes the fingerprint."""
    about = {**about, "format": _FORMAT, "decoder": RULES_VERSION}
    digest = hashlib.blake2b(json.dumps(about, sort_keys=True).encode(), digest_size=16)
    return EntryKind(kind, digest.hexdigest(), about)


MASKS = entry_kind("mask", {})


class ConditioningCache:
    """A cache folder in use by the ranks of a job. A context manager; making it is collective.

    Many jobs may use one folder at once, and fill it; nobody deletes from it meanwhile.

    Args:
        folder: made if missing.
        latents, prompts: what the encoders of this job make.
        work: a folder of this job alone for its columns (`columns`), which is emptied now and deleted at the end.

    Attributes:
        facts: what is known of picture files.
        verdicts: what the user's classifier has said of rows.
        columns: for columns of this job.

    Raises:
        StorageError: it cannot be written or read.
    """

    def __init__(self, folder: Path, latents: EntryKind, prompts: EntryKind, ranks: Ranks, *, work: Path) -> None:
        self.folder, self.ranks = folder, ranks
        self.latents, self.prompts = Entries(folder, latents), Entries(folder, prompts)
        self.masks = Entries(folder, MASKS)
        self._lock: CacheLock | None = None
        with told(folder):
            if ranks.first:
                self._lock = CacheLock(folder, exclusive=False)
                shutil.rmtree(work, ignore_errors=True)
            alone = self._lock is not None and self._lock.alone
            self.facts = Facts(folder / "facts", ranks, alone=alone)
            self.verdicts = Verdicts(folder, ranks, alone=alone)
            for entries in self.kinds:
                entries.refresh(ranks, alone=alone)
            if self._lock is not None:
                self._lock.share()
            ranks.wait()
            self.columns = Columns(work, ranks)

    @property
    def kinds(self) -> tuple[Entries, ...]:
        """Latents, prompts and masks."""
        return self.latents, self.prompts, self.masks

    def get(self, key: SampleKey) -> CachedSample:
        """Read a sample. Raises DataError if an entry is gone or damaged."""
        return CachedSample(
            self.latents.get(key.target),
            tuple(self.latents.get(reference) for reference in key.references),
            self.prompts.get(key.prompt),
            None if key.mask is None else self.masks.get(key.mask),
        )

    def close(self) -> None:
        """Delete this job's columns and let others delete from the cache. Not collective. Idempotent."""
        self.facts.close()
        self.verdicts.close()
        if self.ranks.first:
            self.columns.delete()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> ConditioningCache:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class told:
    """Turns what the file system says of a cache folder into a StorageError; a context manager."""

    def __init__(self, folder: Path, doing: str = "using it") -> None:
        self._folder, self._doing = folder, doing

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError):
            said = error.strerror or str(error)
            if error.filename:
                said += f": {error.filename}"
            with contextlib.suppress(OSError):
                said += f"; {byte_count(shutil.disk_usage(self._folder).free)} are free"
            raise StorageError(
                f"cache folder {shown(self._folder)}: {self._doing} failed ({said}). Make room, or name another folder "
                "(data.cache_dir)"
            ) from error
