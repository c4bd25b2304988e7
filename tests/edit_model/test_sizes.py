"""Sizes of pictures and latents: the encoders', the data's and the pipeline's rules are one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qwen_edit_zero.edit_data.pictures.alignment import grid_size
from qwen_edit_zero.edit_model.sizes import latent_size, size_at_area, token_count, token_grid
from qwen_edit_zero.errors import DataError


@given(st.integers(64, 8000), st.integers(64, 8000), st.sampled_from([128 * 128, 384 * 384, 1024 * 1024]))
def test_buckets_foretell_the_encoders_sizes(width: int, height: int, area: int) -> None:
    expected = grid_size(width, height, area=area)
    if 0 in expected:
        with pytest.raises(DataError):
            size_at_area((width, height), area)
    else:
        assert size_at_area((width, height), area) == expected
        assert latent_size((width, height), area) == (expected[1] // 8, expected[0] // 8)


def test_known_sizes() -> None:
    assert size_at_area((640, 640), 1024 * 1024) == (1024, 1024)
    assert size_at_area((1920, 1080), 1024 * 1024) == (1376, 768)  # the aspect 16:9 at a megapixel
    assert token_count((16, 128, 128), (16, 96, 172)) == 4096 + 48 * 86
    assert token_grid(tuple(torch.empty(2, 16, 96, 172).shape)) == (1, 48, 86)
