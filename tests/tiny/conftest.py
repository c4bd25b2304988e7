"""The tiny model, written once a session, and diffusers' pipeline around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImageEditPlusPipeline

from qwen_edit_zero.edit_model.components import PictureProcessor
from qwen_edit_zero.edit_model.tiny import materialise_tiny_model


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The complete model folder. Do not change its files: copy it."""
    return materialise_tiny_model(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def pipeline(tiny_path: Path) -> Any:
    """`from_pretrained` on the folder; the processor is given because its video half needs torchvision."""
    processor = PictureProcessor.from_pretrained(tiny_path / "processor", local_files_only=True)
    loaded = QwenImageEditPlusPipeline.from_pretrained(
        tiny_path, processor=processor, dtype=torch.float32, local_files_only=True
    )
    loaded.set_progress_bar_config(disable=True)
    return loaded
