"""What is set for a GPU as a whole: before torch is there, and without overruling the user."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from qwen_edit_zero.cluster.device_setup import ALLOCATOR_VARIABLES, choose_allocator, set_numerics
from qwen_edit_zero.settings.models import Settings


def settings(**sections: object) -> Settings:
    return Settings.model_validate({"run": {"max_steps": 1}, **sections})


@pytest.fixture
def switches() -> Iterator[None]:
    before = (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark)
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before[1:]


def test_memory_grows_in_segments_unless_the_user_or_the_run_says_otherwise() -> None:
    environment: dict[str, str] = {}
    choose_allocator(settings(), environment)
    assert environment == {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    for name in ALLOCATOR_VARIABLES:
        own = {name: "max_split_size_mb:512"}
        choose_allocator(settings(), own)
        assert own == {name: "max_split_size_mb:512"}
    environment = {}
    choose_allocator(settings(gpu={"expandable_segments": False}), environment)
    assert not environment


def test_the_allocator_is_chosen_before_torch_is_imported() -> None:
    """torch reads the variable once, so what `train.py` has imported by then must not have brought torch with it."""
    code = "import sys, qwen_edit_zero.train; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.usefixtures("switches")
@pytest.mark.parametrize("tf32", [True, False])
def test_tf32_holds_for_products_and_convolutions(tf32: bool) -> None:
    chosen = settings(precision={"tf32": tf32}, gpu={"cudnn_benchmark": not tf32})
    set_numerics(chosen, torch.device("cuda"))
    assert torch.backends.cuda.matmul.allow_tf32 is tf32
    assert torch.backends.cudnn.allow_tf32 is tf32
    assert torch.backends.cudnn.benchmark is not tf32


@pytest.mark.usefixtures("switches")
def test_cpus_keep_what_they_have() -> None:
    torch.set_float32_matmul_precision("highest")
    set_numerics(settings(), torch.device("cpu"))
    assert torch.get_float32_matmul_precision() == "highest"
