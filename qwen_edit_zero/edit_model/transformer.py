"""Building the transformer from its configuration, empty, wherever the engine wants it built."""

from __future__ import annotations

import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from diffusers.utils import logging as diffusers_logging

from qwen_edit_zero.edit_model.folder import ModelFolder
from qwen_edit_zero.edit_model.lora import add_lora
from qwen_edit_zero.settings.models import LoraSettings


def build_transformer(
    folder: ModelFolder, *, attention: str = "native", lora: LoraSettings | None = None
) -> QwenImageTransformer2DModel:
    """The transformer of `folder` with whatever values its constructors give; weights come from `initial_source`.

    To be called inside the engine's `init_context()`: `torch.device("meta")`, `zero.Init` or none. Parameters follow
    that context; the position tables, which no checkpoint holds, are always real CPU tensors afterwards.
    With `lora`, adapters are added and everything else is frozen. Raises SettingsError if a LoRA target is not there.
    """
    config = {k: v for k, v in folder.transformer_config.items() if not k.startswith("_")}
    module = QwenImageTransformer2DModel.from_config(config)
    restore_position_tables(module)
    set_attention(module, attention)
    if lora is not None:
        add_lora(module, lora)
    return module.train()


def restore_position_tables(module: QwenImageTransformer2DModel) -> None:
    """Make `pos_embed`'s tables real CPU tensors in full precision, whatever context the module was built in.

    They are plain attributes (complex numbers do not survive as buffers), so neither `to_empty` nor loading weights
    ever fills them: built on the meta device, they would stay empty and fail only at the first forward.
    """
    rope = module.pos_embed
    with torch.device("cpu"):
        fresh = QwenEmbedRope(theta=rope.theta, axes_dim=list(rope.axes_dim), scale_rope=rope.scale_rope)
    for name in ("pos_freqs", "neg_freqs"):
        setattr(rope, name, getattr(fresh, name).to("cpu", torch.complex64))
    assert not rope.pos_freqs.is_meta


def set_attention(module: QwenImageTransformer2DModel, backend: str) -> None:
    """Let all blocks compute attention by this diffusers backend."""
    verbosity = diffusers_logging.get_verbosity()
    diffusers_logging.set_verbosity_error()  # it warns each time that the feature is experimental
    try:
        module.set_attention_backend(backend)
    finally:
        diffusers_logging.set_verbosity(verbosity)
