"""What is trained: the flow-matching loss of Qwen-Image-Edit on cached latents and embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qwen_edit_zero.edit_data.batches.batch import EditBatch
from qwen_edit_zero.edit_model.flow import FlowMatching
from qwen_edit_zero.edit_model.folder import ModelFolder
from qwen_edit_zero.edit_model.loss import flow_losses
from qwen_edit_zero.edit_model.sizes import token_count
from qwen_edit_zero.planning.passes.flops import training_flops
from qwen_edit_zero.settings.models import Settings


class EditTask:
    """Losses and cost of micro-batches, by the settings of a run and the model's own configuration."""

    def __init__(self, folder: ModelFolder, settings: Settings) -> None:
        self._flow = FlowMatching(settings.flow, folder.scheduler_config, seed=settings.run.seed)
        self._config = folder.transformer_config
        self._settings = settings.model
        self._mask_weight = settings.data.mask_weight

    def losses(self, forward: Callable[..., Any], batch: EditBatch) -> torch.Tensor:
        """(B,) fp32; noise and sigma depend on the seed, the sample's id, the epoch and the draw in it alone."""
        draw = self._flow.draw(batch.sample_ids, batch.epoch, tuple(batch.target_latents.shape[1:]), batch.draws)
        return flow_losses(
            forward,
            target_latents=batch.target_latents,
            reference_latents=batch.reference_latents,
            prompt_embeds=batch.prompt_embeds,
            prompt_mask=batch.prompt_mask,
            draw=draw.to(batch.target_latents.device),
            mask=batch.mask,
            mask_weight=self._mask_weight,
        )

    def flops(self, batch: EditBatch) -> float:
        """Forward and backward of the real samples; recomputation and fillers are no useful work, so not counted."""
        shapes = [tuple(t.shape) for t in (batch.target_latents, *batch.reference_latents)]
        real = 0 if batch.filler else len(batch)
        one = training_flops(
            self._config,
            image_tokens=token_count(*shapes),
            text_tokens=batch.prompt_embeds.shape[1],
            checkpointing=False,
            settings=self._settings,
        )
        return float(real * one)
