"""Low-rank adapters: same start everywhere, only they train, and diffusers loads what was trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qwen_edit_zero.edit_model.components import load_pipeline
from qwen_edit_zero.edit_model.folder import open_model_folder
from qwen_edit_zero.edit_model.freezing import freeze
from qwen_edit_zero.edit_model.initial import initial_source
from qwen_edit_zero.edit_model.lora import initial_adapter, save_lora
from qwen_edit_zero.edit_model.transformer import build_transformer
from qwen_edit_zero.errors import ModelFolderError, SettingsError
from qwen_edit_zero.settings.models import LoraSettings
from tests.edit_model.small import random_transformer
from tests.edit_model.test_transformer import inputs, materialise

LORA = LoraSettings(rank=4, alpha=12)


def build(path: Path, seed: int = 7) -> torch.nn.Module:
    folder = open_model_folder(path)
    with torch.device("meta"):
        module = build_transformer(folder, lora=LORA)
    return materialise(module, initial_source(folder, module, seed=seed))


def test_only_adapters_train_and_all_targets_have_one(plus_path: Path) -> None:
    module = build(plus_path)
    trained = [name for name, p in module.named_parameters() if p.requires_grad]
    assert len(trained) == 2 * len(LORA.targets) * 2  # blocks, A and B
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    report = freeze(module, ["*.txt_mlp.*"])
    assert report.trained_tensors == len(trained) * 10 // 12


def test_an_adapter_adds_alpha_over_rank_times_b_a_x(plus_path: Path) -> None:
    layer = build(plus_path).transformer_blocks[0].attn.to_q
    a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        b.normal_(generator=torch.Generator().manual_seed(1))
        expected = layer.base_layer(x) + 12 / 4 * (x @ a.T @ b.T)
        assert torch.allclose(layer(x), expected, rtol=1e-5, atol=1e-5)


def test_the_start_is_a_function_of_name_and_seed() -> None:
    name = "transformer_blocks.0.attn.to_q.lora_A.default.weight"
    a = initial_adapter(name, (4, 64), 1)
    assert torch.equal(a, initial_adapter(name, (4, 64), 1))
    assert not torch.equal(a, initial_adapter(name, (4, 64), 2))
    assert not torch.equal(a, initial_adapter(name.replace("to_q", "to_k"), (4, 64), 1))
    assert 0.8 / 8 < a.abs().max() <= 1 / 8
    assert initial_adapter(name.replace("lora_A", "lora_B"), (64, 4), 1).count_nonzero() == 0


def test_an_unknown_target_is_refused_with_the_nearest(plus_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"'attn\.to_out'; nearest: attn\.to_out\.0"), torch.device("meta"):
        build_transformer(open_model_folder(plus_path), lora=LoraSettings(targets=("attn.to_out",)))


def test_a_saved_adapter_gives_the_same_picture_in_diffusers(plus_path: Path, tmp_path: Path) -> None:
    module = build(plus_path)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.3, generator=generator)
        trained = module(**inputs())[0]
    save_lora(tmp_path, module.named_parameters(), LORA)

    fresh = random_transformer().eval()
    with torch.no_grad():
        before = fresh(**inputs())[0]
        load_pipeline(open_model_folder(plus_path), transformer=fresh).load_lora_weights(tmp_path)
        after = fresh(**inputs())[0]
    assert (before - trained).abs().max() > 0.1, "the adapter does nothing, so the test shows nothing"
    assert torch.equal(after, trained)


def test_broken_adapters_are_not_written(plus_path: Path, tmp_path: Path) -> None:
    weights = dict(build(plus_path).named_parameters())
    half = {name: p for name, p in weights.items() if "to_q.lora_B" not in name}
    with pytest.raises(ModelFolderError, match=r"to_q\.lora_A.*to_q\.lora_B"):
        save_lora(tmp_path, half.items(), LORA)
    partitioned = {name: torch.empty(0) for name in weights}
    with pytest.raises(ModelFolderError, match="no elements"):
        save_lora(tmp_path, partitioned.items(), LORA)
    with pytest.raises(ModelFolderError, match="trained without"):
        save_lora(tmp_path, [("proj_out.bias", torch.ones(3))], LORA)
