"""Keys of entries: 16 bytes over content, never over names, so that what moves or is renamed is computed once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

KEY_BYTES = 16


def latent_key(picture: bytes, preparation: bytes) -> bytes:
    """Key of what is made of a prepared picture: its latent, or a mask's grid.

    Args:
        picture: content digest of the file, 16 bytes.
        preparation: says which pixels come out of the file's (`Preparation.key`).
    """
    return hashlib.blake2b(picture + preparation, digest_size=KEY_BYTES).digest()


def prompt_key(text: str, references: Sequence[bytes]) -> bytes:
    """Key of an instruction's embedding, which depends on the reference pictures and their order as well.

    Args:
        text: the instruction, as the text encoder gets it.
        references: in order, `latent_key` of each as the text encoder sees it.
    """
    encoded = text.encode("utf-8", "surrogatepass")
    parts = (len(encoded).to_bytes(8, "little"), encoded, len(references).to_bytes(8, "little"), *references)
    return hashlib.blake2b(b"".join(parts), digest_size=KEY_BYTES).digest()
