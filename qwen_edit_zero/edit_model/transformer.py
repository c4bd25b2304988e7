"""Building the transformer from its configuration, empty, wherever the engine wants it built."""

from __future__ import annotations

import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from diffusers.utils import logging as diffusers_logging

from qwen_edit_zero.edit_model.folder import ModelFolder
from qwen_edit_zero.edit_model.lora import add_lora
from qwen_edit_zero.settings.models import LoraSettings

_QK_NORMS = ("norm_q", "norm_k", "norm_added_q", "norm_added_k")


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
    if not backend.removeprefix("_").startswith("native"):
        for name, part in module.named_modules():
            if name.rpartition(".")[2] in _QK_NORMS:
                part.register_forward_hook(_in_dtype_of_input)


def _in_dtype_of_input(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> torch.Tensor:
    """Autocast leaves norms with fp32 weights, so queries and keys, in fp32 beside values in bf16. PyTorch's attention
    casts; other packages' kernels refuse."""
    return output.to(inputs[0].dtype)
