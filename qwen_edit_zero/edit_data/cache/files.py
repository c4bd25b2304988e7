"""Picture files as the cache sees them: what they are remembered by, and what is made of their bytes in one reading."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import xxhash
from PIL import Image

from qwen_edit_zero.edit_data.manifests.samples import Sample
from qwen_edit_zero.edit_data.pictures.decode import MAX_BYTES, load_picture, picture_size
from qwen_edit_zero.edit_data.storage.files import HeldFile, PictureFile, Stamp
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError


def pictures_of(sample: Sample) -> tuple[PictureFile, tuple[PictureFile, ...], PictureFile | None]:
    """Target, references in order, and mask of a sample."""
    return sample.target, sample.sources, sample.mask


def stamp_hash(stamp: Stamp) -> int:
    """64 bits that change whenever the stamp does."""
    return xxhash.xxh3_64_intdigest(f"{stamp.size} {stamp.version}".encode())


def digest_of(content: bytes) -> bytes:
    """BLAKE2b of a file's bytes, 16 bytes."""
    return hashlib.blake2b(content, digest_size=16).digest()


def look_at(file: PictureFile) -> tuple[bytes, tuple[int, int]]:
    """(content digest, upright (width, height) in pixels). Raises DataError if it is no picture that can be used."""
    content = file.read(MAX_BYTES)
    return digest_of(content), picture_size(HeldFile(file.name, content))


def load_unchanged(
    file: PictureFile, digest: bytes, *, decode: Callable[[HeldFile], Image.Image] = load_picture
) -> Image.Image:
    """Decode a picture, or a mask, whose content must still be that of the digest. Raises DataError."""
    content = file.read(MAX_BYTES)
    if digest_of(content) != digest:
        raise DataError(f"picture {shown(file.name)}: it has changed since this run began; start the run again")
    return decode(HeldFile(file.name, content))
