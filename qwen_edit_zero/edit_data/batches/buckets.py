"""Compound buckets: samples whose target and ordered references have the same sizes, so that they can share a batch.

The transformer takes its rotary positions from the first sample of a batch, so all of a batch must have one grid. Sizes
are those of `pictures.alignment.prepared_sizes`.
"""

from __future__ import annotations

from typing import NamedTuple

VAE_SCALE = 8  # pixels a latent cell, each way
TOKEN_SIDE = 2 * VAE_SCALE  # pixels


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
        """Tokens of target and references together."""
        return sum(height * width for height, width in (self.target, *self.references)) // TOKEN_SIDE**2
