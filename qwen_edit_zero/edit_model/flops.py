"""How much arithmetic a sample costs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def training_flops(
    config: Mapping[str, Any],
    *,
    image_tokens: int,
    text_tokens: int,
    checkpointing: bool,
    adapters_only: bool = False,
) -> int:
    """FLOP (2 a multiply-add) of forward and backward of one sample; matrix products only.

    With width d, L blocks and S = image + text tokens a forward is 24 d^2 S L + 4 S^2 d L, plus modulation 24 d^2 L and
    the small projections. The backward is twice that; recomputing the blocks adds their forward once more.

    Args:
        config: the transformer's configuration.
        image_tokens: target and references together.
        text_tokens: length of the prompt embedding.
        checkpointing: whether each block is recomputed in the backward.
        adapters_only: only LoRA adapters train: no gradient of the base weights is computed. The adapters' own
            cost, about 1/100, is left out.
    """
    width = int(config["num_attention_heads"]) * int(config["attention_head_dim"])
    blocks, in_channels = int(config["num_layers"]), int(config["in_channels"])
    out_channels = int(config.get("out_channels") or in_channels) * int(config.get("patch_size", 2)) ** 2
    tokens = image_tokens + text_tokens
    times = 2 if config.get("zero_cond_t") else 1  # 2511 modulates pictures at sigma and at 0
    linear = blocks * (24 * width**2 * tokens + 12 * width**2 * (1 + times))
    attention = blocks * 4 * tokens**2 * width
    outer = 2 * width * (in_channels * image_tokens + int(config["joint_attention_dim"]) * text_tokens)
    outer += 2 * width * out_channels * image_tokens + 4 * width**2 + times * 2 * width * (256 + width)
    forward = linear + attention + outer
    backward = 2 * forward - (linear + outer if adapters_only else 0)
    return forward + backward + (linear + attention if checkpointing else 0)
