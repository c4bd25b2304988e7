"""A model folder of the real classes with few, random weights and the real tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from PIL import Image
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer, Qwen2VLImageProcessor

from qwen_edit_zero.edit_model.components import PictureProcessor

TRANSFORMER: dict[str, Any] = {
    "num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 32, "joint_attention_dim": 32,
    "in_channels": 64, "out_channels": 16, "axes_dims_rope": (8, 12, 12),
}  # fmt: skip
SCHEDULER: dict[str, Any] = {  # of the released models
    "use_dynamic_shifting": True, "base_shift": 0.5, "max_shift": 0.9, "base_image_seq_len": 256,
    "max_image_seq_len": 8192, "shift": 1.0, "shift_terminal": 0.02, "time_shift_type": "exponential",
}  # fmt: skip


def random_transformer(**changes: Any) -> QwenImageTransformer2DModel:
    """A small transformer whose gates and modulations are not negligible."""
    torch.manual_seed(0)
    module = QwenImageTransformer2DModel(**(TRANSFORMER | changes))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim == 2:
                torch.nn.init.normal_(parameter, std=0.5 / parameter.shape[1] ** 0.5 * (2 if "_mod" in name else 1))
    return module


def text_encoder(tokenizer: Qwen2Tokenizer) -> Qwen2_5_VLForConditionalGeneration:
    """A random vision-language model of two layers."""
    ids = {name: tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in
           ("image_pad", "video_pad", "vision_start", "vision_end", "im_end")}  # fmt: skip
    torch.manual_seed(1)
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": -(-len(tokenizer) // 64) * 64, "hidden_size": 32, "intermediate_size": 64,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]},
            "bos_token_id": None, "eos_token_id": ids["im_end"], "pad_token_id": None,
        },
        vision_config={
            "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "out_hidden_size": 32,
            "fullatt_block_indexes": [1],
        },
        image_token_id=ids["image_pad"], video_token_id=ids["video_pad"],
        vision_start_token_id=ids["vision_start"], vision_end_token_id=ids["vision_end"], tie_word_embeddings=True,
    )  # fmt: skip
    return Qwen2_5_VLForConditionalGeneration(config).eval()


def write_folder(
    root: Path, tokenizer: Qwen2Tokenizer, *, pipeline: str = "QwenImageEditPlusPipeline", **changes: Any
) -> Path:
    """Write a whole model folder; `changes` go to the transformer's configuration."""
    random_transformer(**changes).save_pretrained(root / "transformer", max_shard_size="200KB")
    torch.manual_seed(2)
    vae = AutoencoderKLQwenImage(base_dim=4, z_dim=16, dim_mult=[1, 2, 2, 2], num_res_blocks=1)
    vae.save_pretrained(root / "vae")
    text_encoder(tokenizer).save_pretrained(root / "text_encoder")
    FlowMatchEulerDiscreteScheduler(**SCHEDULER).save_pretrained(root / "scheduler")
    tokenizer.save_pretrained(root / "tokenizer")
    PictureProcessor(image_processor=Qwen2VLImageProcessor(), tokenizer=tokenizer).save_pretrained(root / "processor")
    index = {
        "_class_name": pipeline, "_diffusers_version": "0.36.0",
        "processor": ["transformers", "Qwen2VLProcessor"],
        "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
        "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "transformer": ["diffusers", "QwenImageTransformer2DModel"],
        "vae": ["diffusers", "AutoencoderKLQwenImage"],
    }  # fmt: skip
    (root / "model_index.json").write_text(json.dumps(index))
    return root


def picture(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth random colours with some noise."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (4, 4, 3), dtype=np.uint8)).resize(
        (width, height), Image.Resampling.BICUBIC
    )
    noise = rng.integers(-20, 20, (height, width, 3))
    return Image.fromarray((np.asarray(coarse).astype(int) + noise).clip(0, 255).astype(np.uint8))
