"""What samples cost to compute, as far as it can be known before they are read: tokens, and attention between them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.edit_data.batches.shuffle import Longs

Costs = npt.NDArray[np.float64]


@dataclass(frozen=True)
class SampleCosts:
    """Tokens of each sample, and the arithmetic that they cost.

    Attributes:
        width: of the transformer, d.
        image_tokens: (buckets,) tokens of target and references together, for each bucket's code.
        buckets: (n,) codes.
        text_tokens: (n,) length of each sample's prompt embedding; None if it is not known: all count as equal.
    """

    width: int
    image_tokens: Longs
    buckets: npt.NDArray[np.integer]
    text_tokens: npt.NDArray[np.integer] | None = None

    def tokens(self, indices: Longs) -> Longs:
        """Tokens S of the samples at these indices, image and text."""
        tokens: Longs = self.image_tokens[self.buckets[indices]]
        return tokens if self.text_tokens is None else tokens + self.text_tokens[indices]

    def flop(self, tokens: Longs) -> Costs:
        """24 d^2 S + 4 S^2 d: forward FLOP of a block on a sample of S tokens. All else is in proportion, or small."""
        length = tokens.astype(np.float64)
        flop: Costs = 24.0 * self.width**2 * length + 4.0 * self.width * length**2
        return flop
