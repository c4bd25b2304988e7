"""In fp32 we hand the transformer what diffusers' pipelines do, and sample the picture they sample, bit for bit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import diffusers.pipelines.qwenimage.pipeline_qwenimage_edit as edit_pipeline
import diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus as plus_pipeline
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline, QwenImageTransformer2DModel
from PIL import Image

from qwen_edit_zero.edit_model.components import load_pipeline, load_scheduler, load_vae
from qwen_edit_zero.edit_model.encoders import ConditioningEncoder
from qwen_edit_zero.edit_model.folder import ModelFolder, open_model_folder
from qwen_edit_zero.edit_model.inputs import transformer_inputs
from qwen_edit_zero.edit_model.sampling import decode, forward_count, initial_noise, sample
from qwen_edit_zero.edit_model.sizes import latent_size, size_at_area
from tests.edit_model.small import picture

PICTURES = [picture(120, 80, 1), picture(70, 90, 2), picture(300, 130, 3)]
INSTRUCTION = "把第一张图的天空换成 a starry night，保留 {the} 文字 “Café 2” 🌃"
TENSORS = ("hidden_states", "timestep", "encoder_hidden_states")
VALUES = ("guidance", "encoder_hidden_states_mask", "img_shapes", "return_dict")


@functools.cache
def models(path: Path) -> tuple[ModelFolder, DiffusionPipeline]:
    """The folder and its pipeline, loaded once; a test sets the transformer."""
    folder = open_model_folder(path)
    return folder, load_pipeline(folder)


def transformer_of(path: Path) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel.from_pretrained(path / "transformer", torch_dtype=torch.float32).eval()


@functools.cache
def encoder_of(path: Path, vae_area: int, condition_area: int) -> ConditioningEncoder:
    return ConditioningEncoder(open_model_folder(path), vae_area=vae_area, condition_area=condition_area)


class Recorder:
    """Keeps the keyword arguments of every call of the module it is attached to."""

    def __init__(self, module: torch.nn.Module, *, stop: bool = False) -> None:
        self.calls: list[dict[str, Any]] = []
        self.stop = stop
        module.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert not args
        self.calls.append(kwargs)
        if self.stop:
            raise InterruptedError


def assert_same_inputs(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert set(ours) == {*TENSORS, *VALUES}
    assert not {key: value for key, value in theirs.items() if key not in ours and value}, "an argument we do not pass"
    for name in TENSORS:
        assert ours[name].dtype == theirs[name].dtype == torch.float32, name
        assert torch.equal(ours[name], theirs[name]), name
    for name in VALUES:
        assert ours[name] == theirs[name], name


def set_areas(monkeypatch: pytest.MonkeyPatch, vae: int, condition: int) -> None:
    """The pipelines have their areas written into the code."""
    monkeypatch.setattr(plus_pipeline, "VAE_IMAGE_SIZE", vae)
    monkeypatch.setattr(plus_pipeline, "CONDITION_IMAGE_SIZE", condition)
    original = edit_pipeline.calculate_dimensions
    monkeypatch.setattr(edit_pipeline, "calculate_dimensions", lambda area, ratio: original(vae, ratio))


CASES = [
    *(("plus_path", n) for n in (1, 2, 3)),
    *(("tiny_path", n) for n in (1, 2, 3)),
    ("path_2511", 2),
    ("edit_path", 1),
]


@pytest.mark.parametrize(("path", "count"), CASES)
@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_sampling_is_the_pipelines(
    path: str, count: int, guidance: float, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    vae_area, condition_area, steps = 96 * 96, 64 * 64, 3
    set_areas(monkeypatch, vae_area, condition_area)
    folder, pipeline = models(request.getfixturevalue(path))
    references = PICTURES[:count]
    transformer = transformer_of(folder.path)
    recorder = Recorder(transformer)
    pipeline.register_modules(transformer=transformer)
    width, height = size_at_area(references[-1].size, vae_area)
    theirs = pipeline(
        image=references if folder.variant.takes_several_references else references[0],
        prompt=INSTRUCTION, negative_prompt=" " if guidance > 1 else None, true_cfg_scale=guidance,
        height=height, width=width, num_inference_steps=steps, generator=torch.Generator().manual_seed(11),
    ).images[0]  # fmt: skip
    their_calls, recorder.calls = recorder.calls, []

    ours = _sample(folder, transformer, references, vae_area, condition_area, steps, guidance)

    assert len(their_calls) == len(recorder.calls) == forward_count(steps, guidance)
    for our_call, their_call in zip(recorder.calls, their_calls, strict=True):
        assert_same_inputs(our_call, their_call)
    assert np.asarray(theirs).std() > 1, "an even picture would show nothing"
    assert np.array_equal(np.asarray(ours), np.asarray(theirs))


def _sample(
    folder: ModelFolder, transformer: torch.nn.Module, references: list[Image.Image], vae_area: int,
    condition_area: int, steps: int, guidance: float,
) -> Image.Image:  # fmt: skip
    encoder = encoder_of(folder.path, vae_area, condition_area)
    positive, negative = encoder.encode(references, INSTRUCTION), encoder.encode(references, " ")
    latent = sample(
        transformer,
        scheduler=load_scheduler(folder),
        noise=initial_noise(latent_size(references[-1].size, vae_area), torch.Generator().manual_seed(11)),
        reference_latents=positive.reference_latents,
        prompt_embeds=positive.prompt_embeds,
        negative_embeds=negative.prompt_embeds if guidance > 1 else None,
        steps=steps,
        guidance=guidance,
    )
    return decode(load_vae(folder), latent)


@pytest.mark.parametrize(("path", "count"), [("plus_path", 2), ("edit_path", 1)])
def test_training_inputs_at_the_released_areas_are_the_pipelines(
    path: str, count: int, request: pytest.FixtureRequest
) -> None:
    """Nothing patched: 1024x1024 for the VAE and 384x384 for the vision-language model, up to the first forward."""
    folder, pipeline = models(request.getfixturevalue(path))
    references = PICTURES[:count]
    transformer = transformer_of(folder.path)
    recorder = Recorder(transformer, stop=True)
    pipeline.register_modules(transformer=transformer)
    with pytest.raises(InterruptedError):
        pipeline(
            image=references if count > 1 else references[0], prompt=INSTRUCTION, true_cfg_scale=1.0,
            num_inference_steps=8, generator=torch.Generator().manual_seed(11),
        )  # fmt: skip
    size = latent_size(references[-1].size, 1024 * 1024)
    noise = initial_noise(size, torch.Generator().manual_seed(11))
    encoder = encoder_of(folder.path, 1024 * 1024, 384 * 384)
    conditioning = encoder.encode(references, INSTRUCTION)
    ours = transformer_inputs(
        noise[None],
        [latent[None] for latent in conditioning.reference_latents],
        conditioning.prompt_embeds[None],
        None,
        torch.tensor([1.0]),  # the first step starts from pure noise
    )
    assert_same_inputs(ours, recorder.calls[0])
