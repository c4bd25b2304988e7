"""Which of a sample's texts a draw trains on: a pure function, so that no rank, engine or resumption changes it."""

from __future__ import annotations

import hashlib


def choose(seed: int, sample_id: str, epoch: int, draw: int, n_candidates: int, dropout: float) -> int:
    """Index of the text of one draw of one sample.

    With probability `dropout` it is the last one, which then is "" (see `Instructions.candidates`); otherwise each of
    the others is equally likely. Whether a caption is dropped does not depend on how many texts a sample has.

    Args:
        seed: `run.seed`.
        draw: how often the sample came before in this epoch; 0 unless it comes more than once.
        n_candidates: number of texts, the empty one included if `dropout` > 0.
        dropout: `data.caption_dropout`.
    """
    texts = n_candidates - (1 if dropout > 0 else 0)
    if texts < 1:
        raise ValueError(f"{n_candidates} candidates leave no text to choose with caption dropout {dropout}")
    if texts == 1 and dropout == 0:
        return 0
    digest = hashlib.blake2b(f"text\0{seed}\0{epoch}\0{draw}\0{sample_id}".encode(), digest_size=16).digest()
    # 53 bits fit a float exactly; the other half of the digest is scaled to [0, texts) without a division's bias
    if int.from_bytes(digest[:8], "little") >> 11 < dropout * 2.0**53:
        return n_candidates - 1
    return int.from_bytes(digest[8:], "little") * texts >> 64
