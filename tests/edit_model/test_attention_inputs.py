"""What attention kernels are given under autocast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.transformers import transformer_qwenimage

from qwen_edit_zero.edit_model.folder import open_model_folder
from qwen_edit_zero.edit_model.initial import initial_source
from qwen_edit_zero.edit_model.transformer import build_transformer, set_attention
from tests.edit_model.test_transformer import inputs, materialise


def test_kernels_of_other_packages_get_one_low_precision_dtype(
    plus_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DDP keeps weights in fp32 and computes by autocast; flash-attn and xformers take no fp32 beside bf16."""
    folder = open_model_folder(plus_path)
    module = build_transformer(folder)
    materialise(module, initial_source(folder, module, seed=1))
    given: list[set[torch.dtype]] = []
    dispatch = transformer_qwenimage.dispatch_attention_fn

    def record(*tensors: torch.Tensor, backend: Any, **options: Any) -> torch.Tensor:
        given.append({tensor.dtype for tensor in tensors})
        return dispatch(*tensors, backend=AttentionBackendName.NATIVE, **options)

    monkeypatch.setattr(transformer_qwenimage, "dispatch_attention_fn", record)
    monkeypatch.setattr(type(module), "set_attention_backend", lambda self, backend: None)  # it need not be installed
    outputs = []
    for backend in ("native", "flash"):
        set_attention(module, backend)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            outputs.append(module(**inputs())[0].float())
    blocks = len(module.transformer_blocks)
    assert given[blocks:] == [{torch.bfloat16}] * blocks
    assert (outputs[1] - outputs[0]).norm() < 0.02 * outputs[0].norm()
    with torch.no_grad():
        before = module(**inputs())[0]
    assert before.dtype is torch.float32
    assert given[-1] == {torch.float32}
