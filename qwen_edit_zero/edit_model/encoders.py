"""Conditioning a sample: prompt embedding and latents, by the pipeline's own methods."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec

import torch
from diffusers import DiffusionPipeline
from PIL import Image

from qwen_edit_zero.edit_model.components import load_pipeline, release_memory
from qwen_edit_zero.edit_model.folder import ModelFolder, Variant
from qwen_edit_zero.edit_model.sizes import size_at_area
from qwen_edit_zero.errors import DataError

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
    """Text encoder and VAE of a model folder. They are loaded at the first `encode` and released by `close`.

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
        self.fingerprint = conditioning_fingerprint(
            folder, vae_area=vae_area, condition_area=condition_area, dtype=dtype
        )
        self._pipeline: DiffusionPipeline | None = None

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
        pipeline = self._loaded()
        self._check_instruction(pipeline, instruction)
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
        pipeline = self._loaded()
        pixels = pipeline.image_processor.preprocess(picture, picture.height, picture.width).unsqueeze(2)
        latent: torch.Tensor = pipeline._encode_vae_image(image=pixels.to(self.device, self.dtype), generator=None)
        return latent[0, :, 0].cpu()

    def close(self) -> None:
        """Release the models. Idempotent; a later `encode` loads them again."""
        self._pipeline = None
        release_memory()

    @property
    def _several(self) -> bool:
        return self.folder.variant.takes_several_references

    def _loaded(self) -> DiffusionPipeline:
        if self._pipeline is None:
            self._pipeline = load_pipeline(
                self.folder, device=self.device, dtype=self.dtype, channels_last=self._channels_last
            )
        return self._pipeline

    def _for_vision(self, picture: Image.Image) -> Image.Image:
        area = self.vae_area if self.folder.variant is Variant.EDIT else self.condition_area
        return self._resized(picture, area)

    def _for_vae(self, picture: Image.Image) -> Image.Image:
        return self._resized(picture, self.vae_area)

    def _resized(self, picture: Image.Image, area: int) -> Image.Image:
        width, height = size_at_area(picture.size, area)
        resized: Image.Image = self._loaded().image_processor.resize(picture, height, width)
        return resized

    def _check_references(self, references: Sequence[Image.Image]) -> None:
        if not references:
            raise DataError(f"a sample has no reference picture; {self.folder.variant} edits pictures and needs one")
        if len(references) > 1 and not self._several:
            raise DataError(
                f"a sample has {len(references)} reference pictures, but {self.folder.variant} takes exactly one. Use "
                f"{Variant.EDIT_2509} or keep one reference"
            )

    def _check_instruction(self, pipeline: DiffusionPipeline, instruction: str) -> None:
        markup = [t for t in pipeline.tokenizer.get_added_vocab() if t.startswith("<|") and t in instruction]
        if markup:
            raise DataError(
                f"the instruction {instruction[:60]!r} contains the chat markup {markup[0]}, which would end the "
                "user's turn or stand for a picture; remove it"
            )
        limit = pipeline.tokenizer_max_length
        tokens = len(pipeline.tokenizer(instruction)["input_ids"])
        if tokens > limit:
            raise DataError(
                f"the instruction {instruction[:60]!r}... has {tokens} tokens; the model takes at most {limit}. "
                "Shorten it"
            )


def conditioning_fingerprint(folder: ModelFolder, *, vae_area: int, condition_area: int, dtype: torch.dtype) -> str:
    """Hex digest of everything but the sample that decides what `ConditioningEncoder.encode` returns; loads no model.

    Covers VAE, text encoder, tokenizer and processor files, areas, precision, the picture library in use, this code's
    version and the minor versions of diffusers and transformers.
    """
    facts = {
        "files": folder.fingerprint_of("vae", "text_encoder", "tokenizer", "processor"),
        "variant": folder.variant.value,
        "vae_area": vae_area,
        "condition_area": None if folder.variant is Variant.EDIT else condition_area,
        "dtype": str(dtype),
        "pictures": "pil" if find_spec("torchvision") is None else "torchvision",
        "code": _CODE_VERSION,
        "libraries": [".".join(version(name).split(".")[:2]) for name in ("diffusers", "transformers")],
    }
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=16).hexdigest()
