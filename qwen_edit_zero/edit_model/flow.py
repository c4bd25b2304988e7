"""Flow matching: what is drawn for each sample, and the straight path between picture and noise.

    x = (1 - sigma) z + sigma e,   target velocity = dx/dsigma = e - z

with z the normalised latent, e Gaussian noise and sigma in (0, 1); rectified flow as in Stable Diffusion 3
(https://arxiv.org/abs/2403.03206). Everything random is a function of (seed, sample id, epoch, and how often the sample
came before in the epoch): no rank, engine, batch size or resumption changes it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_shift

from qwen_edit_zero.edit_model.sizes import token_count
from qwen_edit_zero.settings.models import FlowSettings

_EDGE = 2.0**-24  # sigma stays this far inside (0, 1), so that it does in fp32 too


@dataclass(frozen=True)
class FlowDraw:
    """What was drawn for a batch; fp32.

    Attributes:
        noise: (B, 16, h, w).
        sigma: (B,) in (0, 1), shifted.
        weight: (B,) loss weights.
    """

    noise: torch.Tensor
    sigma: torch.Tensor
    weight: torch.Tensor

    def to(self, device: torch.device) -> FlowDraw:
        """The same on another device; GPUs are not waited for."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)

        return FlowDraw(moved(self.noise), moved(self.sigma), moved(self.weight))


class FlowMatching:
    """Draws noise, sigma and weight for samples, by the run's settings and the model's scheduler configuration."""

    def __init__(self, settings: FlowSettings, scheduler_config: Mapping[str, Any], *, seed: int) -> None:
        self.settings, self.scheduler_config, self.seed = settings, scheduler_config, seed

    def draw(
        self, sample_ids: Sequence[str], epoch: int, latent_shape: tuple[int, ...], draws: Sequence[int] = ()
    ) -> FlowDraw:
        """One draw a sample, on CPU.

        Args:
            latent_shape: that of one target latent, (16, h, w).
            draws: how often each sample came before in this epoch; empty: never.
        """
        factor = shift_factor(self.settings.shift, self.scheduler_config, target_tokens=token_count(latent_shape))
        noise, sigmas = [], []
        for sample_id, before in zip(sample_ids, draws or [0] * len(sample_ids), strict=True):
            generator = sample_generator(self.seed, sample_id, epoch, draw=before)
            sigmas.append(shift(draw_sigma(self.settings, generator), factor))  # first: it must not depend on the size
            noise.append(torch.randn(latent_shape, generator=generator))
        sigma = torch.tensor(sigmas, dtype=torch.float32)
        weight = bell_weight(sigma) if self.settings.weighting == "bell" else torch.ones_like(sigma)
        return FlowDraw(torch.stack(noise), sigma, weight)


def sample_generator(seed: int, sample_id: str, epoch: int, purpose: str = "flow", *, draw: int = 0) -> torch.Generator:
    """CPU generator for one sample in one epoch; a stream of its own for each purpose, and for each time it comes."""
    when = f"{epoch}.{draw}" if draw else f"{epoch}"
    key = f"{purpose}\0{seed}\0{when}\0{sample_id}".encode()
    return torch.Generator().manual_seed(int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1)


def draw_sigma(settings: FlowSettings, generator: torch.Generator) -> float:
    """sigma in (0, 1) before the shift; larger is noisier.

    logit_normal: logit(sigma) ~ N(logit_mean, logit_std), SD3 equation 19. uniform. mode: SD3 equation 20,
    sigma = 1 - u - s (cos^2(pi u / 2) - 1 + u) with s = mode_scale and u uniform.
    """
    if settings.sigma_distribution == "logit_normal":
        normal = torch.randn((), dtype=torch.float64, generator=generator).item()
        sigma = 1 / (1 + math.exp(-(settings.logit_mean + settings.logit_std * normal)))
    else:
        u = torch.rand((), dtype=torch.float64, generator=generator).item()
        sigma = u
        if settings.sigma_distribution == "mode":
            sigma = 1 - u - settings.mode_scale * (math.cos(math.pi * u / 2) ** 2 - 1 + u)
    return min(max(sigma, _EDGE), 1 - _EDGE)


def shift_factor(rule: str | float, scheduler_config: Mapping[str, Any], *, target_tokens: int) -> float:
    """The factor f by which odds are multiplied: sigma' / (1 - sigma') = f sigma / (1 - sigma).

    "dynamic" is what the model's scheduler does when sampling: f = e^mu with mu = m n + b linear in the number n of
    *target* tokens (diffusers `calculate_shift`, with the same fallbacks for keys that the configuration lacks), or the
    scheduler's constant `shift` if its shifting is not dynamic. A number is f itself; "none" is 1.
    """
    if rule == "none":
        return 1.0
    if rule != "dynamic":
        return float(rule)
    if not scheduler_config.get("use_dynamic_shifting", False):
        return float(scheduler_config.get("shift", 1.0))
    mu = calculate_shift(
        target_tokens,
        scheduler_config.get("base_image_seq_len", 256),
        scheduler_config.get("max_image_seq_len", 4096),
        scheduler_config.get("base_shift", 0.5),
        scheduler_config.get("max_shift", 1.15),
    )
    return math.exp(mu) if scheduler_config.get("time_shift_type", "exponential") == "exponential" else float(mu)


def shift(sigma: float, factor: float) -> float:
    """sigma' = f / (f + 1/sigma - 1), written so that it holds at 0 too; stays inside (0, 1)."""
    return min(max(factor * sigma / (1 + (factor - 1) * sigma), _EDGE), 1 - _EDGE)


def bell_weight(sigma: torch.Tensor) -> torch.Tensor:
    """w = exp(-2 (sigma - 1/2)^2), less its minimum exp(-1/2), scaled to mean 1 over sigma uniform in (0, 1).

    The mean before scaling is sqrt(pi/2) erf(1/sqrt 2) - exp(-1/2). Middle noise levels weigh up to about 1.6, the
    ends nothing.
    """
    mean = math.sqrt(math.pi / 2) * math.erf(1 / math.sqrt(2)) - math.exp(-0.5)
    return (torch.exp(-2 * (sigma - 0.5) ** 2) - math.exp(-0.5)) / mean


def mix(latent: torch.Tensor, noise: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
    """x = (1 - sigma) z + sigma e in fp32; latent and noise (B, 16, h, w), sigma (B,)."""
    s = sigma.float().view(-1, 1, 1, 1)
    return (1 - s) * latent.float() + s * noise.float()


def velocity(latent: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """e - z in fp32, what the model is to predict."""
    return noise.float() - latent.float()
