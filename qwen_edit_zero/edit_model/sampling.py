"""Sampling a picture under any engine: the pipeline's denoising loop around a forward callable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_shift, retrieve_timesteps
from diffusers.utils.torch_utils import randn_tensor
from PIL import Image

from qwen_edit_zero.edit_model.inputs import pack, target_tokens, transformer_inputs, unpack
from qwen_edit_zero.edit_model.sizes import PATCH, VAE_FACTOR

LATENT_CHANNELS = 16


def forward_count(steps: int, guidance: float) -> int:
    """Forwards that `sample` makes: engines that shard weights need the same number on every rank."""
    return steps * (2 if guidance > 1 else 1)


def initial_noise(latent_size: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """(16, h, w) in fp32, the noise that the pipeline draws from the same generator."""
    shape = (1, 1, LATENT_CHANNELS, *latent_size)
    noise: torch.Tensor = randn_tensor(shape, generator=generator, dtype=torch.float32)
    return noise[0, 0]


@torch.no_grad()
def sample(
    forward: Callable[..., Any],
    *,
    scheduler: FlowMatchEulerDiscreteScheduler,
    noise: torch.Tensor,
    reference_latents: Sequence[torch.Tensor],
    prompt_embeds: torch.Tensor,
    negative_embeds: torch.Tensor | None,
    steps: int,
    guidance: float,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """Denoise one picture; returns its normalised latent (16, h, w) in fp32 on CPU.

    Args:
        forward: takes the transformer's keyword arguments, e.g. `engine.forward` inside `engine.eval_mode()`.
        noise: (16, h, w) to start from; decides the size.
        reference_latents: one (16, h_i, w_i) a reference.
        prompt_embeds, negative_embeds: (L, D) for the instruction and for the negative prompt with the same references.
        steps: denoising steps.
        guidance: s of neg + s (pos - neg), rescaled for each token to the norm of pos (as in the pipeline); with 1 the
            negative prompt is not computed and may be None.
    """
    assert guidance <= 1 or negative_embeds is not None, "guidance needs the embedding of the negative prompt"
    size = (noise.shape[-2], noise.shape[-1])
    references = [latent[None].to(device) for latent in reference_latents]
    prompts = [prompt_embeds[None].to(device)]
    if guidance > 1 and negative_embeds is not None:
        prompts.append(negative_embeds[None].to(device))
    latents = pack(noise[None].float()).to(device)
    timesteps = _start(scheduler, steps, latents.shape[1], device)
    for t in timesteps:
        noisy = unpack(latents, size)
        sigma = t.expand(1).to(latents.dtype) / 1000  # the pipeline's own rounding
        predictions = [
            target_tokens(forward(**transformer_inputs(noisy, references, prompt, None, sigma)), noisy).float()
            for prompt in prompts
        ]
        velocity = guide(predictions[0], predictions[1], guidance) if len(predictions) == 2 else predictions[0]
        latents = scheduler.step(velocity, t, latents, return_dict=False)[0]
    return unpack(latents, size)[0].cpu()


def guide(positive: torch.Tensor, negative: torch.Tensor, guidance: float) -> torch.Tensor:
    """neg + s (pos - neg), each token rescaled to the norm of pos; (B, n, 64)."""
    combined = negative + guidance * (positive - negative)
    norm = torch.norm(positive, dim=-1, keepdim=True)
    rescaled: torch.Tensor = combined * (norm / torch.norm(combined, dim=-1, keepdim=True))
    return rescaled


@torch.no_grad()
def decode(vae: AutoencoderKLQwenImage, latent: torch.Tensor) -> Image.Image:
    """The picture of a normalised latent (16, h, w)."""
    device, dtype = vae.device, vae.dtype
    z = latent[None, :, None].to(device, dtype)
    mean = torch.tensor(vae.config.latents_mean).view(1, -1, 1, 1, 1).to(device, dtype)
    inverse_std = 1.0 / torch.tensor(vae.config.latents_std).view(1, -1, 1, 1, 1).to(device, dtype)
    pixels = vae.decode(z / inverse_std + mean, return_dict=False)[0][:, :, 0]
    processor = VaeImageProcessor(vae_scale_factor=VAE_FACTOR * PATCH)
    picture: Image.Image = processor.postprocess(pixels, output_type="pil")[0]
    return picture


def _start(
    scheduler: FlowMatchEulerDiscreteScheduler, steps: int, target_token_count: int, device: torch.device | str
) -> torch.Tensor:
    """Timesteps in (0, 1000], noisiest first, shifted for the size as the scheduler's configuration says."""
    config = scheduler.config
    mu = calculate_shift(
        target_token_count,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", 1.15),
    )
    sigmas = np.linspace(1.0, 1 / steps, steps)
    timesteps, _ = retrieve_timesteps(scheduler, steps, device, sigmas=sigmas, mu=mu)
    scheduler.set_begin_index(0)
    return timesteps  # type: ignore[no-any-return]
