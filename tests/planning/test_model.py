"""The planner's parameters and sizes are those of the real classes."""

from __future__ import annotations

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions

from qwen_edit_zero.edit_model.freezing import freeze
from qwen_edit_zero.edit_model.lora import add_lora
from qwen_edit_zero.errors import ModelFolderError, SettingsError
from qwen_edit_zero.planning.jobs import tokens
from qwen_edit_zero.planning.jobs.known import RELEASED, known_config, takes_several_references
from qwen_edit_zero.planning.jobs.model import TransformerShape
from qwen_edit_zero.planning.jobs.tokens import SampleShape
from qwen_edit_zero.planning.jobs.trainable import split
from qwen_edit_zero.settings.models import LoraSettings, ModelSettings

ODD = {
    "num_layers": 3, "num_attention_heads": 5, "attention_head_dim": 12, "joint_attention_dim": 20, "in_channels": 12,
    "out_channels": None, "patch_size": 1, "axes_dims_rope": [4, 4, 4], "use_additional_t_cond": True,
}  # fmt: skip
WIDE = ODD | {"num_layers": 1, "num_attention_heads": 7, "attention_head_dim": 34, "axes_dims_rope": [10, 12, 12]}


def build(config: dict[str, object]) -> QwenImageTransformer2DModel:
    with torch.device("meta"):
        return QwenImageTransformer2DModel.from_config({k: v for k, v in config.items() if not k.startswith("_")})


def named(module: torch.nn.Module, trained: bool | None = None) -> list[tuple[str, tuple[int, ...]]]:
    parameters = module.named_parameters()
    return [(n, tuple(p.shape)) for n, p in parameters if trained is None or p.requires_grad is trained]


@pytest.mark.parametrize("name", ["tiny", "Qwen-Image-Edit-2509", "odd", "wide"])
def test_parameters_are_those_of_the_class(name: str) -> None:
    config = {"odd": ODD, "wide": WIDE}.get(name) or dict(known_config(name))
    parameters = TransformerShape.from_config(config).parameters()
    assert [(p.name, p.shape) for p in parameters] == named(build(config))
    assert all((p.block is not None) == p.name.startswith(f"transformer_blocks.{p.block}.") for p in parameters)


def test_released_models_have_20_430_401_088_parameters() -> None:
    for config in RELEASED.values():
        shape = TransformerShape.from_config(config)
        assert sum(p.elements for p in shape.parameters()) == 20_430_401_088
        assert shape.block_elements() == 339_831_296
    assert TransformerShape.from_config(known_config("Qwen/qwen-image-edit-2511")).zero_cond_t


TARGETS = [LoraSettings().targets, ("img_mod.1", "proj"), ("linear", "to_out.0", "img_in", "linear_1")]


@pytest.mark.parametrize("targets", TARGETS)
def test_adapters_are_those_of_peft(targets: tuple[str, ...]) -> None:
    lora = LoraSettings(rank=3, targets=targets)
    module = build(ODD)
    add_lora(module, lora)
    trained, frozen = split(TransformerShape.from_config(ODD), ModelSettings(lora=lora))
    assert [(p.name, p.shape) for p in trained] == named(module, trained=True)
    assert [(p.name, p.shape) for p in frozen] == named(module, trained=False)


def test_frozen_parameters_are_those_of_training() -> None:
    patterns = ("*_mod.*", "transformer_blocks.[01].attn.*", "img_in.weight")
    module = build(ODD)
    freeze(module, patterns)
    trained, frozen = split(TransformerShape.from_config(ODD), ModelSettings(freeze=patterns))
    assert [(p.name, p.shape) for p in trained] == named(module, trained=True)
    assert [(p.name, p.shape) for p in frozen] == named(module, trained=False)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (ModelSettings(freeze=("*.no_such",)), "no parameter matches '\\*.no_such'"),
        (ModelSettings(freeze=("*",)), "nothing would train"),
        (ModelSettings(lora=LoraSettings(targets=("norm_q",))), "no linear layer"),
    ],
)
def test_what_cannot_train_is_refused(settings: ModelSettings, says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        split(TransformerShape.from_config(ODD), settings)


def test_impossible_configurations_are_refused() -> None:
    with pytest.raises(SettingsError, match="num_layers = 0"):
        TransformerShape.from_config(ODD | {"num_layers": 0})
    with pytest.raises(SettingsError, match="add up"):
        TransformerShape.from_config(ODD | {"attention_head_dim": 14})


def test_unknown_models_are_named_with_those_that_are_known() -> None:
    with pytest.raises(ModelFolderError, match=r"no-such-model is no folder .* Qwen-Image-Edit-2511, tiny"):
        known_config("no-such-model")
    assert takes_several_references("tiny")
    assert not takes_several_references("Qwen/Qwen-Image-Edit")


@pytest.mark.parametrize("area", [1024 * 1024, 384 * 384, 512 * 768, 96 * 96])
def test_sizes_are_the_pipeline_s(area: int) -> None:
    for aspect in (1.0, 0.5, 16 / 9, 3.3, 1 / 2.39):
        assert tokens.calculate_dimensions(area, aspect) == calculate_dimensions(area, aspect)


def test_tokens_of_a_sample() -> None:
    square = SampleShape.of(1024 * 1024, references=2)
    assert (square.target_tokens, square.image_tokens) == (4096, 3 * 4096)
    assert square.text_tokens == 2 * (196 + 7) + 65 + 5  # a 384x384 picture is 14 x 14 vision tokens
    assert square.tokens == square.image_tokens + square.text_tokens
    assert SampleShape.of(1024 * 1024, 16 / 9, text_tokens=10).target == (768 // 16, 1376 // 16)
