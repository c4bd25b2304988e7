"""Which pictures and texts of a sample are encoded, by the settings: one rule for training and `data check`.

Imports no torch.
"""

from __future__ import annotations

from collections.abc import Collection

from qwen_edit_zero.edit_data.cache.needs import Making
from qwen_edit_zero.edit_data.instructions.prepare import Instructions
from qwen_edit_zero.edit_data.pictures.prepare import Areas
from qwen_edit_zero.edit_model.folder import Variant
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.training.texts import HeldOutTexts, TrainingTexts


def areas_of(settings: Settings, variant: Variant) -> Areas:
    """Sizes of what the encoders see: the text encoder of the first variant sees what the VAE sees."""
    data = settings.data
    return Areas(data.vae_area, data.vae_area if variant is Variant.EDIT else data.condition_area)


def making_of(settings: Settings, variant: Variant, texts: TrainingTexts) -> Making:
    """Which pictures and texts of a training sample are encoded."""
    data = settings.data
    return Making(
        areas=areas_of(settings, variant),
        align=data.align,
        augment=data.augment,
        variants=data.variants,
        seed=settings.run.seed,
        texts=texts,
        judge=texts.judge,
    )


def making_held_out(
    settings: Settings, variant: Variant, instructions: Instructions, pictured: Collection[str]
) -> Making:
    """Of a held-out sample: its instruction, and for guidance the negative prompt with the same references.

    `pictured` are the ids of the samples that need the latter.
    """
    negative = settings.sampling.negative_prompt if settings.sampling.guidance > 1 else None
    return Making(
        areas=areas_of(settings, variant),
        align=settings.data.align,
        texts=HeldOutTexts(instructions, negative, pictured),
    )
