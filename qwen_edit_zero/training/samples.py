"""Pictures of held-out samples, drawn by all ranks together under any engine."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import torch

from qwen_edit_zero.cluster.collectives import barrier
from qwen_edit_zero.edit_data.pictures.decode import load_picture
from qwen_edit_zero.edit_model.components import load_scheduler, load_vae, release_memory
from qwen_edit_zero.edit_model.flow import sample_generator
from qwen_edit_zero.edit_model.folder import ModelFolder
from qwen_edit_zero.edit_model.sampling import decode, initial_noise, sample
from qwen_edit_zero.engines.base import ParallelEngine
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.training.conditioning import Conditioned
from qwen_edit_zero.training.report import save_sample


class SamplePictures:
    """Draws the held-out samples; each starts from the same noise every time, so that pictures can be compared."""

    def __init__(
        self, engine: ParallelEngine, folder: ModelFolder, conditioned: Conditioned, settings: Settings
    ) -> None:
        self._engine, self._folder, self._settings = engine, folder, settings
        self._cache, self._held_out = conditioned.cache, conditioned.held_out

    def draw(self, out: Path) -> Path | None:
        """Write pictures and their descriptions to `out`; None if there is nothing to draw. Collective.

        Samples are dealt out to the ranks, or groups of ranks that split sequences. One without a sample in a round
        repeats the last: sharded engines need the same number of forwards everywhere.
        """
        samples = self._held_out.samples
        if not samples:
            return None
        rank, world = self._engine.dp_rank, self._engine.dp_size
        latents: dict[int, torch.Tensor] = {}
        averaged = self._engine.averaged() if self._settings.sampling.weights == "ema" else nullcontext()
        with averaged, self._engine.eval_mode():
            for first in range(0, len(samples), world):
                index = min(first + rank, len(samples) - 1)
                latent = self._denoise(index)
                if first + rank < len(samples) and self._engine.ranks.sequence_rank == 0:
                    latents[index] = latent
        if latents:
            self._write(out, latents)
        barrier()
        return out

    def _denoise(self, index: int) -> torch.Tensor:
        settings, held_out = self._settings.sampling, self._held_out
        entry = self._cache.get(held_out.keys[index])
        negative = self._cache.get(held_out.negative_keys[index]).prompt_embeds if held_out.negative_keys else None
        height, width = entry.target_latent.shape[-2:]
        generator = sample_generator(self._settings.run.seed, held_out.samples[index].id, 0, "sampling")
        forward: Callable[..., object] = self._engine.forward
        return sample(
            forward,
            scheduler=load_scheduler(self._folder),
            noise=initial_noise((height, width), generator),
            reference_latents=entry.reference_latents,
            prompt_embeds=entry.prompt_embeds,
            negative_embeds=negative,
            steps=settings.steps,
            guidance=settings.guidance,
            device=self._engine.device,
        )

    def _write(self, out: Path, latents: dict[int, torch.Tensor]) -> None:
        """Decode with the VAE, which is loaded for this and released: training needs its memory."""
        device = self._engine.device
        vae = load_vae(
            self._folder, device=device, channels_last=self._settings.gpu.channels_last and device.type == "cuda"
        )
        for index, latent in latents.items():
            held = self._held_out.samples[index]
            save_sample(
                out,
                index,
                id=held.id,
                category=held.category,
                instruction=held.instruction,
                references=[load_picture(path) for path in held.sources],
                target=load_picture(held.target),
                output=decode(vae, latent),
            )
        del vae
        release_memory()
