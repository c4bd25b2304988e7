"""Loading the frozen components with the libraries' own classes: from local safetensors only, never half-loaded."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
)
from diffusers.utils import logging as diffusers_logging
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer, Qwen2VLProcessor
from transformers.processing_utils import ProcessorMixin
from transformers.utils import logging as transformers_logging

from qwen_edit_zero.edit_model.folder import ModelFolder, Variant
from qwen_edit_zero.errors import ModelFolderError


class PictureProcessor(Qwen2VLProcessor):  # type: ignore[misc]
    """Qwen2VLProcessor without its video half, never used here, which cannot load without torchvision."""

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None, **kwargs: Any
    ) -> None:
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id = tokenizer.convert_tokens_to_ids(self.video_token)
        ProcessorMixin.__init__(self, image_processor, tokenizer, chat_template=chat_template)

    @property
    def model_input_names(self) -> list[str]:
        """Names of the tensors that a call returns."""
        return [*self.tokenizer.model_input_names, *self.image_processor.model_input_names]


def load_tokenizer(folder: ModelFolder) -> Qwen2Tokenizer:
    """The tokenizer of the folder."""
    return Qwen2Tokenizer.from_pretrained(folder.path / "tokenizer", local_files_only=True)


def load_processor(folder: ModelFolder) -> PictureProcessor:
    """The picture and text processor; pictures go through torchvision where it is installed, else through PIL."""
    with _quiet():
        processor: PictureProcessor = PictureProcessor.from_pretrained(folder.path / "processor", local_files_only=True)
    return processor


def load_scheduler(folder: ModelFolder) -> FlowMatchEulerDiscreteScheduler:
    """The sampling scheduler with the model's own shift."""
    return FlowMatchEulerDiscreteScheduler.from_config(folder.scheduler_config)


def load_vae(
    folder: ModelFolder,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    channels_last: bool = False,
) -> AutoencoderKLQwenImage:
    """The frozen VAE, in eval mode; `channels_last`: its convolutions in that layout, with results equal but rounded
    otherwise."""
    with _quiet():
        vae, info = AutoencoderKLQwenImage.from_pretrained(
            folder.path / "vae",
            torch_dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    _refuse_incomplete(folder, "vae", info)
    vae = vae.to(device).eval().requires_grad_(False)
    return put_channels_last(vae) if channels_last else vae


def put_channels_last(vae: AutoencoderKLQwenImage) -> AutoencoderKLQwenImage:
    """Store the weights of all convolutions with channels innermost; what they compute is then laid out so too."""
    for module in vae.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.Conv3d):
            three_d = isinstance(module, torch.nn.Conv3d)
            module.to(memory_format=torch.channels_last_3d if three_d else torch.channels_last)  # type: ignore[call-overload]
    return vae


def load_text_encoder(
    folder: ModelFolder, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Qwen2_5_VLForConditionalGeneration:
    """The frozen vision-language model, in eval mode, read straight onto `device`."""
    device = torch.device(device)
    with _quiet():
        encoder, info = Qwen2_5_VLForConditionalGeneration.from_pretrained(
            folder.path / "text_encoder",
            dtype=dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
            device_map=None if device.type == "cpu" else {"": device},
        )
    _refuse_incomplete(folder, "text_encoder", info)
    return encoder.eval().requires_grad_(False)


def load_pipeline(
    folder: ModelFolder,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    transformer: torch.nn.Module | None = None,
    channels_last: bool = False,
    vae: bool = True,
    text_encoder: bool = True,
) -> DiffusionPipeline:
    """The variant's own pipeline around `transformer`; without one it conditions but cannot sample.

    `channels_last` is for the VAE. Without `vae` or `text_encoder` that model is not loaded, and the pipeline does
    only what needs the other.

    Raises ModelFolderError if the tokenizer splits the prompt template into another number of tokens than the
    pipeline drops: every embedding would be shifted.
    """
    kind = QwenImageEditPipeline if folder.variant is Variant.EDIT else QwenImageEditPlusPipeline
    pipeline = kind(
        scheduler=load_scheduler(folder),
        vae=load_vae(folder, device=device, dtype=dtype, channels_last=channels_last) if vae else None,
        text_encoder=load_text_encoder(folder, device=device, dtype=dtype) if text_encoder else None,
        tokenizer=load_tokenizer(folder),
        processor=load_processor(folder),
        transformer=transformer,
    )
    pipeline.set_progress_bar_config(disable=True)
    for name in ("tokenizer", "processor"):
        tokenizer = pipeline.tokenizer if name == "tokenizer" else pipeline.processor.tokenizer
        found = template_prefix_tokens(pipeline, tokenizer)
        if found != pipeline.prompt_template_encode_start_idx:
            raise ModelFolderError(
                f"{folder.path / name}: this tokenizer makes {found} tokens of the prompt template's prefix, but the "
                f"model expects {pipeline.prompt_template_encode_start_idx}. It is not the tokenizer of "
                "Qwen-Image-Edit; download that folder again"
            )
    return pipeline


def template_prefix_tokens(pipeline: DiffusionPipeline, tokenizer: Qwen2Tokenizer) -> int:
    """Tokens before the first thing that depends on the sample: a picture or the instruction."""
    prefix = pipeline.prompt_template_encode.split("{}")[0].split("<|vision_start|>")[0]
    return len(tokenizer(prefix)["input_ids"])


def release_memory() -> None:
    """Give the memory of dropped models back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _refuse_incomplete(folder: ModelFolder, component: str, info: dict[str, Any]) -> None:
    missing, misshapen = sorted(info.get("missing_keys") or ()), sorted(map(str, info.get("mismatched_keys") or ()))
    if missing or misshapen:
        wrong = ", ".join((missing + misshapen)[:4])
        raise ModelFolderError(
            f"{folder.path / component}: weights and config.json do not fit each other; {len(missing)} tensors are "
            f"missing and {len(misshapen)} have another shape: {wrong}. They would be random; download it again"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the libraries' progress bars and remarks, of which each rank would print its own; errors still raise."""
    loggers = (transformers_logging, diffusers_logging)
    before = [(logger.get_verbosity(), logger.is_progress_bar_enabled()) for logger in loggers]
    for logger in loggers:
        logger.set_verbosity_error()
        logger.disable_progress_bar()
    try:
        yield
    finally:
        for logger, (verbosity, bars) in zip(loggers, before, strict=True):
            logger.set_verbosity(verbosity)
            if bars:
                logger.enable_progress_bar()
