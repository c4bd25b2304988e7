"""Pictures prepared by the data side reach the encoders as the pipeline would have made them, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

from qwen_edit_zero.edit_data.pictures.draws import PLAIN
from qwen_edit_zero.edit_data.pictures.prepare import Areas, Pictures, prepare
from qwen_edit_zero.edit_model.encoders import ConditioningEncoder
from qwen_edit_zero.edit_model.folder import open_model_folder
from tests.edit_model.small import picture

SIZES = [(1023, 767), (767, 1023), (640, 480), (17, 31), (500, 100), (333, 334), (96, 96), (1187, 893)]


@pytest.mark.parametrize("size", SIZES)
def test_without_augmentation_the_pixels_are_the_pipelines(size: tuple[int, int]) -> None:
    """The pipeline's lines for its `condition_images` and `vae_images`, at areas small enough for a test."""
    areas = Areas(vae=200 * 200, condition=100 * 100)
    image = picture(*size)
    prepared = prepare(Pictures(image, (image,)), PLAIN, areas)
    processor = VaeImageProcessor(vae_scale_factor=16)
    for got, area in ((prepared.references[0], areas.vae), (prepared.shown[0], areas.condition)):
        width, height = calculate_dimensions(area, image.width / image.height)
        assert got.tobytes() == processor.resize(image, height, width).tobytes()
        again = processor.preprocess(got, got.height, got.width)
        assert torch.equal(again, processor.preprocess(image, height, width))
    assert prepared.target.tobytes() == prepared.references[0].tobytes()


def test_latents_and_embeddings_of_prepared_pictures_are_those_of_the_pictures(plus_path: Path) -> None:
    areas = Areas(vae=64 * 64, condition=56 * 56)
    encoder = ConditioningEncoder(
        open_model_folder(plus_path), vae_area=areas.vae, condition_area=areas.condition, device="cpu"
    )
    references, target = (picture(90, 61, 1), picture(64, 100, 2)), picture(90, 61, 3)
    prepared = prepare(Pictures(target, references), PLAIN, areas)
    whole = encoder.encode(references, "把图1换成图2", target)
    assert torch.equal(encoder.prompt(prepared.shown, "把图1换成图2"), whole.prompt_embeds)
    assert whole.target_latent is not None
    assert torch.equal(encoder.latent(prepared.target), whole.target_latent)
    for got, expected in zip(prepared.references, whole.reference_latents, strict=True):
        assert torch.equal(encoder.latent(got), expected)
