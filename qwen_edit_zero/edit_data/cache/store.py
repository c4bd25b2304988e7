"""A folder of what the frozen encoders made of each sample, one safetensors file an entry, keyed by content."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch
import xxhash

from qwen_edit_zero.edit_data.cache.digests import content_digest
from qwen_edit_zero.edit_data.manifests.manifest import Sample
from qwen_edit_zero.edit_data.pictures.decode import RULES_VERSION
from qwen_edit_zero.edit_data.storage.files import PictureFile
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError, StorageError

_FORMAT = "1"  # part of every key, so that entries of another format are not found
_ABANDONED_SECONDS = 24 * 3600
_HEADER_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class CachedSample:
    """What training needs of a sample, on the CPU.

    Attributes:
        target_latent: (16, h / 8, w / 8), normalised.
        reference_latents: (16, h_i / 8, w_i / 8) each, in the sample's order.
        prompt_embeds: (L, D), without padding.
    """

    target_latent: torch.Tensor
    reference_latents: tuple[torch.Tensor, ...]
    prompt_embeds: torch.Tensor

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by their names in an entry's file."""
        references = {f"reference_latents.{i}": t for i, t in enumerate(self.reference_latents)}
        return {"target_latent": self.target_latent, "prompt_embeds": self.prompt_embeds, **references}

    @classmethod
    def from_tensors(cls, tensors: dict[str, torch.Tensor]) -> CachedSample:
        """The inverse of `tensors`. Raises KeyError if one is missing."""
        references = tuple(tensors[f"reference_latents.{i}"] for i in range(len(tensors) - 2))
        return cls(tensors["target_latent"], references, tensors["prompt_embeds"])


class ConditioningCache:
    """Entries `entries/ab/abcd....safetensors` in a folder that many processes may read and write at once.

    An entry appears whole or not at all: it is written beside and renamed. Entries of other fingerprints lie in the
    same folder untouched, so settings can be changed back and forth without computing anything twice.

    Args:
        folder: where the cache lies; made on the first write.
        fingerprint: says everything but the sample that entries depend on: the encoders' weights, their settings and
            the picture areas.
    """

    def __init__(self, folder: Path, fingerprint: str) -> None:
        self.folder = folder
        self.fingerprint = fingerprint

    def key(self, sample: Sample, *, digest_of: Callable[[PictureFile], str] = content_digest) -> str:
        """32 hex digits over the contents of the sample's pictures in order, its instruction and the fingerprint.

        Raises:
            DataError: a picture cannot be read.
        """
        references = [digest_of(path) for path in sample.sources]
        parts = [_FORMAT, RULES_VERSION, self.fingerprint, sample.instruction, references, digest_of(sample.target)]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def path(self, key: str) -> Path:
        """Where the entry of this key lies."""
        return self.folder / "entries" / key[:2] / f"{key}.safetensors"

    def has(self, key: str, *, verify: bool = False) -> bool:
        """Whether the entry is there and whole: by its header and size, with `verify` by its checksum too."""
        try:
            if verify:
                _decode(self.path(key).read_bytes())
            else:
                _check_whole(self.path(key))
        except (OSError, _BadEntryError):
            return False
        return True

    def get(self, key: str) -> CachedSample:
        """Read an entry and compare its checksum.

        Raises:
            DataError: the entry is gone or damaged. A damaged one is deleted, so that the next start makes it again.
        """
        path = self.path(key)
        try:
            return _decode(path.read_bytes())
        except FileNotFoundError:
            raise DataError(
                f"cache entry {shown(path)} is gone; start the run again, which computes what is missing"
            ) from None
        except OSError as error:
            raise DataError(f"cache entry {shown(path)} cannot be read ({error.strerror or error})") from error
        except _BadEntryError as error:
            with contextlib.suppress(OSError):
                path.unlink()
            raise DataError(
                f"cache entry {shown(path)} is damaged ({error}) and was deleted; "
                "start the run again, which computes what is missing"
            ) from error

    def put(self, key: str, sample: CachedSample) -> None:
        """Write an entry, atomically.

        Raises:
            StorageError: the disk is full or the folder cannot be written.
        """
        path = self.path(key)
        data = _encode(sample)
        temporary = self.folder / "unfinished" / f"{key}-{uuid.uuid4().hex}"
        try:
            temporary.parent.mkdir(parents=True, exist_ok=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            try:
                temporary.write_bytes(data)
                os.replace(temporary, path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        except OSError as error:
            raise StorageError(
                f"cache folder {shown(self.folder)}: writing an entry of {len(data):,} bytes failed "
                f"({error.strerror or error}); make room or name another folder (data.cache_dir)"
            ) from error

    def sweep(self) -> None:
        """Delete what writers that died left behind more than a day ago."""
        for leftover in (self.folder / "unfinished").glob("*"):
            with contextlib.suppress(OSError):
                if time.time() - leftover.stat().st_mtime > _ABANDONED_SECONDS:
                    leftover.unlink()


class _BadEntryError(Exception):
    """The bytes are no whole entry."""


def _encode(sample: CachedSample) -> bytes:
    # Cloned, because safetensors refuses tensors that share memory, as those of a picture given twice may.
    tensors = {
        name: t.detach().to("cpu").clone(memory_format=torch.contiguous_format) for name, t in sample.tensors().items()
    }
    data: bytes = safetensors.torch.save(tensors, {"xxh3_128": _checksum(tensors)})
    return data


def _decode(data: bytes) -> CachedSample:
    try:
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        if header["__metadata__"]["xxh3_128"] != _checksum(tensors):
            raise _BadEntryError("its checksum is wrong")
        return CachedSample.from_tensors(tensors)
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise _BadEntryError(f"it is no whole safetensors file: {error}") from error


def _checksum(tensors: dict[str, torch.Tensor]) -> str:
    digest = xxhash.xxh3_128()
    for name in sorted(tensors):
        t = tensors[name]
        digest.update(f"{name} {t.dtype} {tuple(t.shape)}\n".encode())
        digest.update(t.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _check_whole(path: Path) -> None:
    """Compare the size of a safetensors file with what its header says."""
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), "little")
        if length > min(size, _HEADER_LIMIT):
            raise _BadEntryError("it is cut short")
        try:
            header = json.loads(file.read(length))
            end = max(t["data_offsets"][1] for name, t in header.items() if name != "__metadata__")
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise _BadEntryError("its header is damaged") from error
        if size != 8 + length + end:
            raise _BadEntryError("it is cut short")
