"""Small model folders, made once a session."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Qwen2Tokenizer

from qwen_edit_zero.edit_model.tiny import materialise_tiny_model
from tests.edit_model.qwen_tokenizer import real_tokenizer
from tests.edit_model.small import write_folder


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Qwen2Tokenizer:
    """The real Qwen tokenizer."""
    return real_tokenizer(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="session")
def plus_path(tmp_path_factory: pytest.TempPathFactory, tokenizer: Qwen2Tokenizer) -> Path:
    """A small Qwen-Image-Edit-2509. Do not change its files: copy it."""
    return write_folder(tmp_path_factory.mktemp("plus"), tokenizer)


@pytest.fixture(scope="session")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model."""
    return materialise_tiny_model(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def edit_path(tmp_path_factory: pytest.TempPathFactory, tokenizer: Qwen2Tokenizer) -> Path:
    """A small Qwen-Image-Edit."""
    return write_folder(tmp_path_factory.mktemp("edit"), tokenizer, pipeline="QwenImageEditPipeline")


@pytest.fixture(scope="session")
def path_2511(tmp_path_factory: pytest.TempPathFactory, tokenizer: Qwen2Tokenizer) -> Path:
    """A small Qwen-Image-Edit-2511."""
    return write_folder(tmp_path_factory.mktemp("edit2511"), tokenizer, zero_cond_t=True)
