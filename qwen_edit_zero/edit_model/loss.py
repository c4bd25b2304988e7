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
) -> torch.Tensor:
    """(B,) fp32: mean square over the target's tokens and channels of (prediction - (e - z)), times the draw's weight.

    Args:
        forward: the engine's forward, taking the transformer's keyword arguments.
        target_latents: (B, 16, h, w).
        reference_latents: one (B, 16, h_i, w_i) a reference.
        prompt_embeds, prompt_mask: (B, L, D) and (B, L) or None.
        draw: noise, sigma and weight of these samples, on the same device.
    """
    noisy = mix(target_latents, draw.noise, draw.sigma)
    output = forward(**transformer_inputs(noisy, reference_latents, prompt_embeds, prompt_mask, draw.sigma))
    error = target_tokens(output, noisy).float() - pack(velocity(target_latents, draw.noise))
    return error.square().mean(dim=(1, 2)) * draw.weight
