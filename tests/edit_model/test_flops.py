"""The arithmetic formula against a count of what PyTorch really computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from qwen_edit_zero.edit_model.flops import training_flops
from qwen_edit_zero.edit_model.inputs import transformer_inputs
from qwen_edit_zero.edit_model.lora import add_lora
from qwen_edit_zero.settings.models import LoraSettings
from tests.edit_model.small import TRANSFORMER, random_transformer

SIZES: dict[str, Any] = {"num_layers": 6, "num_attention_heads": 8, "joint_attention_dim": 128}
TEXT, IMAGE = 40, 12 * 12 + 10 * 8


def counted(*, checkpointing: bool, lora: bool, **changes: Any) -> int:
    module = random_transformer(**(SIZES | changes))
    if lora:
        add_lora(module, LoraSettings(rank=1))
    module.set_attention_backend("_native_math")  # the counter knows its matrix products
    if checkpointing:
        module.enable_gradient_checkpointing()
    latents = torch.randn(1, 16, 24, 24), torch.randn(1, 16, 20, 16)
    inputs = transformer_inputs(latents[0], latents[1:], torch.randn(1, TEXT, 128), None, torch.tensor([0.5]))
    with FlopCounterMode(display=False) as counter:
        module.train()(**inputs)[0].sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("zero_cond_t", [False, True])
def test_training_flops_are_within_3_percent_of_a_count(checkpointing: bool, zero_cond_t: bool) -> None:
    """The formula counts a little more: gradients of the inputs and of the last block's unused text output."""
    config = TRANSFORMER | SIZES | {"zero_cond_t": zero_cond_t}
    formula = training_flops(config, image_tokens=IMAGE, text_tokens=TEXT, checkpointing=checkpointing)
    found = counted(checkpointing=checkpointing, lora=False, zero_cond_t=zero_cond_t)
    assert formula == pytest.approx(found, rel=0.03)


def test_lora_flops_are_within_6_percent_of_a_count() -> None:
    config = TRANSFORMER | SIZES
    formula = training_flops(config, image_tokens=IMAGE, text_tokens=TEXT, checkpointing=True, adapters_only=True)
    assert formula == pytest.approx(counted(checkpointing=True, lora=True), rel=0.06)


def test_the_released_model_at_1024_with_one_reference() -> None:
    """RECIPE's closed form, to the share that its small terms have."""
    width, blocks, tokens = 3072, 60, 2 * 4096 + 250
    full = {"num_layers": 60, "num_attention_heads": 24, "attention_head_dim": 128, "joint_attention_dim": 3584,
            "in_channels": 64, "out_channels": 16}  # fmt: skip
    closed = 24 * width**2 * tokens * blocks + 4 * tokens**2 * width * blocks
    found = training_flops(full, image_tokens=8192, text_tokens=250, checkpointing=True)
    assert found == pytest.approx(4 * closed, rel=1e-3)
    assert found > training_flops(full, image_tokens=8192, text_tokens=250, checkpointing=False) > 3 * closed
