"""Memory and arithmetic of the text encoder, Qwen2.5-VL, on one prompt: vision tower, language model and its head.

The pipeline asks for all hidden states, so those of every layer of both parts are kept, and with them the cache of keys
and values and the logits of all tokens, none of which it uses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RELEASED_TEXT_ENCODER: Mapping[str, Any] = {
    "text_config": {
        "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
        "num_key_value_heads": 4, "vocab_size": 152064,
    },
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "out_hidden_size": 3584,
        "fullatt_block_indexes": [7, 15, 23, 31], "window_size": 112, "patch_size": 14, "spatial_merge_size": 2,
    },
    "tie_word_embeddings": False,
}  # fmt: skip
_CHANNELS = 3 * 2  # of a patch: colours, and two frames that are alike


@dataclass(frozen=True)
class Prompt:
    """What one prompt costs: bytes at most, weights not included, and FLOP of products and attention."""

    peak: int
    flops: int


@dataclass(frozen=True)
class TextEncoderShape:
    """Sizes of the language model, and of its vision tower (`vision_...`)."""

    width: int
    inner: int
    layers: int
    key_width: int
    vocabulary: int
    tied: bool
    vision_width: int
    vision_inner: int
    vision_heads: int
    vision_layers: int
    whole_layers: int
    patch: int
    window: int
    merge: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TextEncoderShape:
        """Read a `text_encoder/config.json`, of any version: sizes of the language model may lie at its top."""
        text = config.get("text_config", config)
        vision = {**RELEASED_TEXT_ENCODER["vision_config"], **config["vision_config"]}
        width, heads = int(text["hidden_size"]), int(text["num_attention_heads"])
        return cls(
            width=width,
            inner=int(text["intermediate_size"]),
            layers=int(text["num_hidden_layers"]),
            key_width=width // heads * int(text.get("num_key_value_heads") or heads),
            vocabulary=int(text["vocab_size"]),
            tied=bool(config.get("tie_word_embeddings", False)),
            vision_width=int(vision["hidden_size"]),
            vision_inner=int(vision["intermediate_size"]),
            vision_heads=int(vision["num_heads"]),
            vision_layers=int(vision["depth"]),
            whole_layers=len([i for i in vision["fullatt_block_indexes"] if i < int(vision["depth"])]),
            patch=int(vision["patch_size"]),
            window=int(vision["window_size"]),
            merge=int(vision["spatial_merge_size"]),
        )

    @property
    def elements(self) -> int:
        """Of all weights."""
        w, m, d, k = self.vision_width, self.vision_inner, self.width, self.key_width
        block = (4 * w * w + 4 * w) + (3 * w * m + 2 * m + w) + 2 * w
        merged = self.merge**2 * w
        vision = (
            w * _CHANNELS * self.patch**2 + self.vision_layers * block + w + merged * (merged + 1) + d * (merged + 1)
        )
        layer = d * (d + 2 * k) + d + 2 * k + d * d + 3 * d * self.inner + 2 * d
        heads = self.vocabulary * d * (1 if self.tied else 2)
        return vision + self.layers * layer + d + heads

    def prompt(self, tokens: int, pictures: Sequence[tuple[int, int]], element: int) -> Prompt:
        """Of a prompt of `tokens`, vision tokens included.

        Args:
            pictures: (rows, columns) of vision tokens of each.
            element: bytes of an element in the compute dtype.
        """
        return Prompt(self._peak(tokens, pictures, element), self._flops(tokens, pictures))

    def _peak(self, tokens: int, pictures: Sequence[tuple[int, int]], b: int) -> int:
        w, m, d = self.vision_width, self.vision_inner, self.width
        patches = self.merge**2 * sum(rows * columns for rows, columns in pictures)
        vision_state, state = patches * w * b, tokens * d * b
        positions = patches * (w // self.vision_heads * 2 * 4 + 2 * 8 + 2) + state  # and the embedded prompt
        # In the last block of the tower, with the hidden states before it. Rotary positions turn in fp32.
        copies = 2 * patches * w * 4 if b < 4 else 0
        turning = self.vision_layers * vision_state + 4 * vision_state + copies + 4 * patches * w * 4
        gated = (self.vision_layers + 2) * vision_state + 3 * patches * m * b
        seen = (self.vision_layers + 1) * vision_state + patches // self.merge**2 * d * b
        keys = 2 * self.layers * tokens * self.key_width * b
        inner = seen + (self.layers + 2) * state + keys + 3 * tokens * self.inner * b
        end = seen + (self.layers + 1) * state + keys + tokens * self.vocabulary * b
        return max(positions + turning, positions + gated, inner, end)

    def _flops(self, tokens: int, pictures: Sequence[tuple[int, int]]) -> int:
        w, m, d, k = self.vision_width, self.vision_inner, self.width, self.key_width
        merged = self.merge**2
        patches = [merged * rows * columns for rows, columns in pictures]
        n = sum(patches)
        flops = 2 * n * w * _CHANNELS * self.patch**2 + self.vision_layers * 2 * n * (4 * w * w + 3 * w * m)
        flops += self.whole_layers * 4 * w * sum(p * p for p in patches)
        flops += (self.vision_layers - self.whole_layers) * 4 * w * sum(map(self._within_windows, pictures))
        flops += 2 * (n // merged) * merged * w * (merged * w + d)
        flops += self.layers * (2 * tokens * (d * (d + 2 * k) + d * d + 3 * d * self.inner) + 4 * tokens**2 * d)
        return flops + 2 * tokens * d * self.vocabulary

    def _within_windows(self, picture: tuple[int, int]) -> int:
        """Pairs of patches that are in the same window."""
        side = self.window // self.patch // self.merge

        def parts(length: int) -> list[int]:
            return [min(side, length - first) for first in range(0, length, side)]

        areas = (rows * columns * self.merge**2 for rows in parts(picture[0]) for columns in parts(picture[1]))
        return sum(area * area for area in areas)
