"""The transformer's arguments, exactly as the pipeline hands them over."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers import QwenImageEditPlusPipeline

from qwen_edit_zero.edit_model.sizes import PATCH, VAE_FACTOR, token_grid


def pack(latents: torch.Tensor) -> torch.Tensor:
    """(B, 16, h, w) -> (B, h/2 * w/2, 64): a token is a 2x2 patch, channel-major."""
    batch, channels, height, width = latents.shape
    assert height % PATCH == width % PATCH == 0, f"a latent of {height}x{width} has no whole number of tokens"
    packed: torch.Tensor = QwenImageEditPlusPipeline._pack_latents(latents.contiguous(), batch, channels, height, width)
    return packed


def unpack(tokens: torch.Tensor, latent_size: tuple[int, int]) -> torch.Tensor:
    """(B, h/2 * w/2, 64) -> (B, 16, h, w), the inverse of `pack`."""
    height, width = (side * VAE_FACTOR for side in latent_size)
    latents: torch.Tensor = QwenImageEditPlusPipeline._unpack_latents(tokens, height, width, VAE_FACTOR)
    return latents[:, :, 0]


def transformer_inputs(
    noisy_target: torch.Tensor,
    references: Sequence[torch.Tensor],
    prompt_embeds: torch.Tensor,
    prompt_mask: torch.Tensor | None,
    sigma: torch.Tensor,
) -> dict[str, Any]:
    """Keyword arguments of `QwenImageTransformer2DModel.forward` for a batch in which all shapes agree.

    Args:
        noisy_target: (B, 16, h, w), x of the flow.
        references: one (B, 16, h_i, w_i) a reference, clean, in order.
        prompt_embeds: (B, L, D), padded right with zeros.
        prompt_mask: (B, L), nonzero at valid positions; None where nothing is padded, for fast attention kernels.
        sigma: (B,) in [0, 1]; the model's embedder multiplies by 1000.

    Floating tensors are fp32; the engine casts them to its compute precision. The rotary embedding reads the first
    sample's grids only, so a batch must not mix shapes (it cannot: tensors hold one shape).
    """
    latents = [noisy_target, *references]
    grids = [token_grid(tuple(latent.shape)) for latent in latents]
    return {
        "hidden_states": torch.cat([pack(latent.float()) for latent in latents], dim=1),
        "timestep": sigma.float(),
        "guidance": None,
        "encoder_hidden_states": prompt_embeds.float(),
        "encoder_hidden_states_mask": prompt_mask,
        "img_shapes": [grids] * noisy_target.shape[0],
        "return_dict": False,
    }


def target_tokens(output: tuple[torch.Tensor, ...] | torch.Tensor, noisy_target: torch.Tensor) -> torch.Tensor:
    """The part of the transformer's output that belongs to the target: its first tokens, (B, n, 64)."""
    prediction = output if isinstance(output, torch.Tensor) else output[0]
    _, rows, columns = token_grid(tuple(noisy_target.shape))
    return prediction[:, : rows * columns]
