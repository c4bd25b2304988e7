"""The real vocabulary gives the real ids, and the template's prefix has the 64 tokens that the pipelines drop."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import Qwen2Tokenizer

from qwen_edit_zero.edit_model.components import load_pipeline, template_prefix_tokens
from qwen_edit_zero.edit_model.folder import open_model_folder
from tests.edit_model.qwen_tokenizer import SPECIAL_TOKENS


def test_real_ids(tokenizer: Qwen2Tokenizer) -> None:
    assert tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS)) == list(range(151643, 151657))
    # Ids published in the documentation of Qwen's tokenizer and of Qwen2.5's examples.
    assert tokenizer("Hello world")["input_ids"] == [9707, 1879]
    assert tokenizer("你好，世界")["input_ids"] == [108386, 3837, 99489]
    text = "把 the sky 换成夜晚 🌃\n<|im_end|>"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


@pytest.mark.parametrize("path", ["plus_path", "edit_path"])
def test_the_template_prefix_has_64_tokens(path: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(path)
    pipeline = load_pipeline(open_model_folder(folder))
    assert pipeline.prompt_template_encode_start_idx == 64
    assert template_prefix_tokens(pipeline, pipeline.tokenizer) == 64
