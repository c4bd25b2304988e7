"""The training loss of a batch, a value for each sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from qwen_edit_zero.edit_model.flow import FlowDraw, mix, velocity
from qwen_edit_zero.edit_model.inputs import pack, target_tokens, transformer_inputs


def flow_losses(
    forward: Callable[..., Any],
    *,
    target_latents: torch.Tensor,
    reference_latents: Sequence[torch.Tensor],
    prompt_embeds: torch.Tensor,
    prompt_mask: torch.Tensor | None,
    draw: FlowDraw,
    mask: torch.Tensor | None = None,
    mask_weight: float = 1.0,
) -> torch.Tensor:
    """(B,) fp32: mean square over the target's tokens and channels of (prediction - (e - z)), times the draw's weight.

    With a mask the mean over tokens is a weighted one, see `token_weights`.

    Args:
        forward: the engine's forward, taking the transformer's keyword arguments.
        target_latents: (B, 16, h, w).
        reference_latents: one (B, 16, h_i, w_i) a reference.
        prompt_embeds, prompt_mask: (B, L, D) and (B, L) or None.
        draw: noise, sigma and weight of these samples, on the same device.
        mask: (B, h, w) in [0, 1], 1 where the edit is; all 0 for a sample without a mask.
        mask_weight: what a token with mask 1 weighs against one with mask 0.
    """
    noisy = mix(target_latents, draw.noise, draw.sigma)
    output = forward(**transformer_inputs(noisy, reference_latents, prompt_embeds, prompt_mask, draw.sigma))
    error = target_tokens(output, noisy).float() - pack(velocity(target_latents, draw.noise))
    square = error.square().mean(dim=2)
    if mask is not None and mask_weight != 1.0:
        square = square * token_weights(mask, mask_weight)
    return square.mean(dim=1) * draw.weight


def token_weights(mask: torch.Tensor, mask_weight: float) -> torch.Tensor:
    """(B, h/2 * w/2) fp32: loss weight of each target token, 1 + (mask_weight - 1) m, scaled to mean 1 over a sample.

    m is the mask's mean over the token's 2x2 cells. Scaled, because a sample's whole weight must not depend on how
    large its edit is. Where the mask is even, all 0 or all 1, every token weighs 1.
    """
    tokens = pack(mask.float()[:, None].expand(-1, 4, -1, -1)).mean(dim=2)
    weights = 1 + (mask_weight - 1) * tokens
    return weights / weights.mean(dim=1, keepdim=True)
