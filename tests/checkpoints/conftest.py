from __future__ import annotations

from pathlib import Path

import pytest
import torch
from diffusers import QwenImageTransformer2DModel

from qwen_edit_zero.edit_model.folder import ModelFolder, open_model_folder
from tests.checkpoints.trained_run import FROZEN, Weights, reference, save_weights


@pytest.fixture(scope="module")
def base() -> ModelFolder:
    return open_model_folder("tiny")


@pytest.fixture(scope="module")
def base_weights(base: ModelFolder) -> Weights:
    model = QwenImageTransformer2DModel.from_pretrained(base.path / "transformer", torch_dtype=torch.float32)
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.fixture(scope="module")
def trained(base_weights: Weights) -> Weights:
    """Other values than the base model's, for everything that is not frozen."""
    g = torch.Generator().manual_seed(1)
    moved = {n: w + torch.randn(w.shape, generator=g) for n, w in base_weights.items() if n not in FROZEN}
    return base_weights | moved


@pytest.fixture(scope="module")
def run(base: ModelFolder, trained: Weights, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    save_weights(folder / "checkpoints", {n: w for n, w in trained.items() if n not in FROZEN}, reference(base))
    return folder
