"""Keys of entries: 16 bytes over content, never over names, so that what moves or is renamed is computed once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

KEY_BYTES = 16


def latent_key(picture: bytes, draw: bytes = b"") -> bytes:
    """Key of a picture's latent, of its mask's grid: its content, and the draw of augmentations if there is one.

    Args:
        picture: content digest of the file, 16 bytes.
        draw: says how the picture was augmented; empty: not at all.
    """
    return hashlib.blake2b(picture + draw, digest_size=KEY_BYTES).digest() if draw else picture


def prompt_key(text: str, references: Sequence[bytes], draw: bytes = b"") -> bytes:
    """Key of an instruction's embedding, which depends on the reference pictures and their order as well.

    Args:
        text: the instruction, as the text encoder gets it.
        references: content digests in order.
        draw: as in `latent_key`.
    """
    encoded = text.encode("utf-8", "surrogatepass")
    parts = (len(encoded).to_bytes(8, "little"), encoded, len(references).to_bytes(8, "little"), *references, draw)
    return hashlib.blake2b(b"".join(parts), digest_size=KEY_BYTES).digest()


def row_digest(parts: Sequence[str]) -> bytes:
    """16 bytes over what a manifest's row says, for the fingerprint of a data set."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        encoded = part.encode("utf-8", "surrogatepass")
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()
