"""Conditioning a sample: prompt embedding and latents, by the pipeline's own methods."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from importlib.util import find_spec

import torch
from diffusers import DiffusionPipeline
from PIL import Image

from qwen_edit_zero.edit_model.components import load_pipeline, load_text_encoder, load_vae, release_memory
from qwen_edit_zero.edit_model.folder import ModelFolder, Variant
from qwen_edit_zero.edit_model.instruction_limit import InstructionLimit
from qwen_edit_zero.edit_model.sizes import VAE_FACTOR, size_at_area
from qwen_edit_zero.errors import DataError

LATENT_CHANNELS = 16
_VISION_PIXELS = 28 * 28  # of a token of the vision-language model
_TOKENS_AROUND = 6  # "Picture 1: " and the marks of a picture; the marks of a turn
_CODE_VERSION = 1  # to be raised whenever this file's results change


@dataclass(frozen=True)
class Conditioning:
    """What the frozen models make of one sample; CPU tensors.

    Attributes:
        prompt_embeds: (L, D), the valid positions only; vision tokens included, the template's prefix dropped.
        target_latent: (16, h, w) = (16, H/8, W/8), normalised per channel; None if no target was given.
        reference_latents: one (16, h_i, w_i) a reference, in order.
    """

    prompt_embeds: torch.Tensor
    target_latent: torch.Tensor | None
    reference_latents: tuple[torch.Tensor, ...]


class ConditioningEncoder:
    """Text encoder and VAE of a model folder. Each is loaded when it is first needed, and released by `release`.

    Args:
        vae_area: pixels to which pictures are resized for the VAE (1024 * 1024 for the released models).
        condition_area: pixels to which references are resized for the vision-language model (384 * 384); the first
            variant, Qwen-Image-Edit, shows it the picture of `vae_area` instead.
        device, dtype: where and in which precision the models compute.
        channels_last: see `load_vae`.
    """

    def __init__(
        self,
        folder: ModelFolder,
        *,
        vae_area: int,
        condition_area: int,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
        channels_last: bool = False,
    ) -> None:
        self.folder, self.device, self.dtype = folder, torch.device(device), dtype
        self._channels_last = channels_last
        self.vae_area, self.condition_area = vae_area, condition_area
        self._pipeline: DiffusionPipeline | None = None
        self._limit: InstructionLimit | None = None

    @torch.no_grad()
    def encode(
        self, references: Sequence[Image.Image], instruction: str, target: Image.Image | None = None
    ) -> Conditioning:
        """Encode one sample. Pictures are upright RGB; each is resized to the area, keeping its aspect to 32 pixels.

        Raises DataError if a picture is too narrow, the instruction too long or holding chat markup, or if the variant
        does not take this number of references.
        """
        self._check_references(references)
        return Conditioning(
            prompt_embeds=self.prompt([self._for_vision(picture) for picture in references], instruction),
            target_latent=None if target is None else self.latent(self._for_vae(target)),
            reference_latents=tuple(self.latent(self._for_vae(picture)) for picture in references),
        )

    @torch.no_grad()
    def prompt(self, references: Sequence[Image.Image], instruction: str) -> torch.Tensor:
        """The embedding (L, D) of an instruction with its references, which are RGB and have been resized to
        `condition_area` already; CPU. Raises DataError as `encode`."""
        self._check_references(references)
        self.check_instruction(instruction)
        pipeline = self._with_text_encoder()
        prompt_embeds, mask = pipeline.encode_prompt(
            prompt=[instruction], image=list(references) if self._several else references[0], device=self.device
        )
        assert mask is None, "a single prompt needs no padding"
        if not torch.isfinite(prompt_embeds).all():
            raise DataError(
                f"the text encoder gave non-finite values for {instruction[:60]!r} in {self.dtype}: it overflows in "
                "fp16. Use precision bf16 or fp32"
            )
        embedding: torch.Tensor = prompt_embeds[0].cpu()
        return embedding

    @torch.no_grad()
    def latent(self, picture: Image.Image) -> torch.Tensor:
        """The normalised latent (16, height / 8, width / 8) of a picture, which is RGB and has been resized to
        `vae_area` already: sides are multiples of 32. CPU."""
        pipeline = self._with_vae()
        pixels = pipeline.image_processor.preprocess(picture, picture.height, picture.width).unsqueeze(2)
        latent: torch.Tensor = pipeline._encode_vae_image(image=pixels.to(self.device, self.dtype), generator=None)
        return latent[0, :, 0].cpu()

    def check_instruction(self, instruction: str) -> None:
        """Raises DataError for an instruction that is too long or holds chat markup; loads the tokenizer only."""
        if self._limit is None:
            pipeline = self._light()
            self._limit = InstructionLimit(pipeline.tokenizer, pipeline.tokenizer_max_length)
        self._limit.check(instruction)

    def latent_bytes(self, width: int, height: int) -> int:
        """Size of a picture's latent, sides in pixels as the VAE sees it."""
        return LATENT_CHANNELS * (width // VAE_FACTOR) * (height // VAE_FACTOR) * self.dtype.itemsize

    def prompt_bytes(self, references: Sequence[tuple[int, int]], instruction: str) -> int:
        """About the size of an embedding; references by (width, height) in pixels as the text encoder sees them."""
        pictures = sum(width * height // _VISION_PIXELS + _TOKENS_AROUND for width, height in references)
        text = len(instruction.encode("utf-8", "replace")) // 4 + _TOKENS_AROUND
        return (pictures + text) * self._text_width * self.dtype.itemsize

    def release(self) -> None:
        """Release the models, not the tokenizer. Idempotent; what needs them later loads them again."""
        if self._pipeline is not None:
            self._pipeline.vae = self._pipeline.text_encoder = None
        release_memory()

    def close(self) -> None:
        """Release everything. Idempotent; a later `encode` loads it again."""
        self._pipeline = self._limit = None
        release_memory()

    @cached_property
    def _text_width(self) -> int:
        config = json.loads((self.folder.path / "text_encoder" / "config.json").read_text(encoding="utf-8"))
        return int(config.get("text_config", config)["hidden_size"])

    @property
    def _several(self) -> bool:
        return self.folder.variant.takes_several_references

    def _light(self) -> DiffusionPipeline:
        """The pipeline with tokenizer and processor, and whatever models have been needed so far."""
        if self._pipeline is None:
            self._pipeline = load_pipeline(self.folder, vae=False, text_encoder=False)
        return self._pipeline

    def _with_text_encoder(self) -> DiffusionPipeline:
        pipeline = self._light()
        if pipeline.text_encoder is None:
            pipeline.text_encoder = load_text_encoder(self.folder, device=self.device, dtype=self.dtype)
        return pipeline

    def _with_vae(self) -> DiffusionPipeline:
        pipeline = self._light()
        if pipeline.vae is None:
            pipeline.vae = load_vae(
                self.folder, device=self.device, dtype=self.dtype, channels_last=self._channels_last
            )
        return pipeline

    def _for_vision(self, picture: Image.Image) -> Image.Image:
        area = self.vae_area if self.folder.variant is Variant.EDIT else self.condition_area
        return self._resized(picture, area)

    def _for_vae(self, picture: Image.Image) -> Image.Image:
        return self._resized(picture, self.vae_area)

    def _resized(self, picture: Image.Image, area: int) -> Image.Image:
        width, height = size_at_area(picture.size, area)
        resized: Image.Image = self._light().image_processor.resize(picture, height, width)
        return resized

    def _check_references(self, references: Sequence[Image.Image]) -> None:
        if not references:
            raise DataError(f"a sample has no reference picture; {self.folder.variant} edits pictures and needs one")
        if len(references) > 1 and not self._several:
            raise DataError(
                f"a sample has {len(references)} reference pictures, but {self.folder.variant} takes exactly one. Use "
                f"{Variant.EDIT_2509} or keep one reference"
            )


def about_latents(folder: ModelFolder, *, dtype: torch.dtype) -> dict[str, object]:
    """Everything but the prepared picture that decides what `ConditioningEncoder.latent` returns; loads no model."""
    return {
        "vae": folder.fingerprint_of("vae"),
        "dtype": str(dtype).removeprefix("torch."),
        "code": _CODE_VERSION,
        "libraries": _minor_versions("diffusers"),
    }


def about_prompts(folder: ModelFolder, *, dtype: torch.dtype) -> dict[str, object]:
    """Everything but the text and the prepared references that decides what `ConditioningEncoder.prompt` returns;
    loads no model."""
    return {
        "text_encoder": folder.fingerprint_of("text_encoder", "tokenizer", "processor"),
        "variant": folder.variant.value,
        "dtype": str(dtype).removeprefix("torch."),
        "pictures": "pil" if find_spec("torchvision") is None else "torchvision",
        "code": _CODE_VERSION,
        "libraries": _minor_versions("diffusers", "transformers"),
    }


def _minor_versions(*packages: str) -> list[str]:
    return [f"{name} {'.'.join(version(name).split('.')[:2])}" for name in packages]
