"""The transformer is built anywhere, empty, and then holds exactly the folder's weights."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from torch import nn

from qwen_edit_zero.edit_model.attention import resolve_attention
from qwen_edit_zero.edit_model.folder import ModelFolder, open_model_folder
from qwen_edit_zero.edit_model.freezing import freeze
from qwen_edit_zero.edit_model.initial import initial_source
from qwen_edit_zero.edit_model.inputs import transformer_inputs
from qwen_edit_zero.edit_model.transformer import build_transformer, restore_position_tables
from qwen_edit_zero.errors import ModelFolderError, SettingsError
from qwen_edit_zero.settings.models import LoraSettings
from tests.edit_model.small import TRANSFORMER
from tests.ranks import run_ranks

FULL_SIZE = {
    "num_layers": 60, "num_attention_heads": 24, "attention_head_dim": 128, "joint_attention_dim": 3584,
    "in_channels": 64, "out_channels": 16, "patch_size": 2, "axes_dims_rope": [16, 56, 56], "guidance_embeds": False,
}  # fmt: skip
LORA = LoraSettings(rank=4)


def inputs() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    noisy, reference = (torch.randn(1, 16, 4, 6, generator=generator) for _ in range(2))
    return transformer_inputs(noisy, [reference], torch.randn(1, 7, 32, generator=generator), None, torch.tensor([0.3]))


def materialise(module: nn.Module, source: Any) -> nn.Module:
    """What an engine does: allocate, then read every parameter, here in pieces of 1000."""
    module.to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            flat = parameter.view(-1)
            for start in range(0, flat.numel(), 1000):
                length = min(1000, flat.numel() - start)
                flat[start : start + length] = source.read(name, start, length)
    return module.eval()


def test_the_released_configuration_has_20_430_401_088_parameters(plus_path: Path) -> None:
    folder = open_model_folder(plus_path)
    full = ModelFolder(
        folder.path, folder.variant, FULL_SIZE, folder.vae_config, folder.scheduler_config, folder.shards
    )
    with torch.device("meta"):
        module = build_transformer(full)
    assert sum(p.numel() for p in module.parameters()) == 20_430_401_088
    assert sum(p.numel() for p in module.transformer_blocks[0].parameters()) == 339_831_296
    assert str(freeze(module, ["transformer_blocks.*_mod.*"])).startswith("13,6")


@pytest.mark.parametrize("lora", [None, LORA])
def test_built_on_meta_and_streamed_it_computes_what_diffusers_loads(
    plus_path: Path, lora: LoraSettings | None
) -> None:
    folder = open_model_folder(plus_path)
    with torch.device("meta"):
        module = build_transformer(folder, lora=lora)
    assert module.training
    assert all(p.is_meta for p in module.parameters())
    materialise(module, initial_source(folder, module, seed=1))
    expected = QwenImageTransformer2DModel.from_pretrained(plus_path / "transformer").eval()
    for parameter in expected.parameters():
        parameter.data = parameter.data.clone()  # out of the mapped file, whose odd addresses choose other CPU kernels
    with torch.no_grad():
        assert torch.equal(module(**inputs())[0], expected(**inputs())[0])


def test_weights_that_do_not_fit_the_configuration_are_listed(plus_path: Path, tmp_path: Path) -> None:
    model = shutil.copytree(plus_path, tmp_path / "model")
    config = model / "transformer" / "config.json"
    config.write_text(
        config.read_text()
        .replace('"num_layers": 2', '"num_layers": 3')
        .replace('"in_channels": 64', '"in_channels": 32')
    )
    folder = open_model_folder(model)
    with torch.device("meta"):
        module = build_transformer(folder)
    with pytest.raises(ModelFolderError) as error:
        initial_source(folder, module, seed=0)
    assert "img_in.weight has shape [64, 64], not [64, 32]" in str(error.value)
    assert "transformer_blocks.2." in str(error.value)
    assert "is missing" in str(error.value)


def test_freezing_by_patterns(plus_path: Path) -> None:
    folder = open_model_folder(plus_path)
    with torch.device("meta"):
        module = build_transformer(folder)
    report = freeze(module, ["transformer_blocks.0.*", "*_in.*"])
    frozen = {name for name, p in module.named_parameters() if not p.requires_grad}
    assert {name.split(".")[0] for name in frozen} == {"transformer_blocks", "img_in", "txt_in"}
    assert not any(name.startswith("transformer_blocks.1.") for name in frozen)
    assert report.frozen == sum(p.numel() for p in module.parameters() if not p.requires_grad)
    assert report.trained + report.frozen == sum(p.numel() for p in module.parameters())
    assert report.groups["img_in"] == (0, sum(p.numel() for p in module.img_in.parameters()))
    attention, second = report.groups["transformer_blocks.*.attn"], module.transformer_blocks[1].attn
    assert attention == (sum(p.numel() for p in second.parameters()),) * 2  # block 0 is frozen, block 1 trains
    saved = report.lines(compute_bytes=2, masters_apart=False)[-1]
    assert f"{report.frozen * 8 / 1e9:.3g} GB of moments" in saved
    assert f"{report.frozen * 2 / 1e9:.3g} GB of master weights" in saved
    assert (
        f"{report.frozen * 4 / 1e9:.3g} GB of master weights" in report.lines(compute_bytes=2, masters_apart=True)[-1]
    )
    with pytest.raises(SettingsError, match=r"transformer_block\.0\.\*.*nearest names are transformer_blocks\.0"):
        freeze(module, ["transformer_block.0.*"])
    with pytest.raises(SettingsError, match="nothing would train"):
        freeze(module, ["*"])


def _under_zero_init(rank: int, world: int, path: str) -> None:
    import deepspeed

    folder = open_model_folder(path)
    plain = build_transformer(folder)
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    for lora in (None, LORA):
        with deepspeed.zero.Init(config_dict_or_path=config):
            module = build_transformer(folder, lora=lora)
        for name in ("pos_freqs", "neg_freqs"):
            table = getattr(module.pos_embed, name)
            assert table.device.type == "cpu"
            assert torch.equal(table, getattr(plain.pos_embed, name)), f"{name} lost precision"
        assert all(p.numel() == 0 for p in module.parameters()), "not partitioned"
        shapes = {n: tuple(p.shape) for n, p in plain.named_parameters()}
        source = initial_source(folder, module, seed=3)
        for name in source.names():
            if ".lora_" not in name:
                assert source.shape(name) == shapes[name.replace(".base_layer.", ".")]
        report = freeze(module, ["proj_out.*"] if lora is None else [])
        assert report.frozen > 0
        assert (report.trained > 4 * report.frozen) == (lora is None)


def test_it_can_be_built_partitioned_by_zero_3(plus_path: Path) -> None:
    run_ranks(_under_zero_init, 2, str(plus_path))


def test_position_tables_survive_half_precision_defaults() -> None:
    plain = QwenImageTransformer2DModel(**TRANSFORMER).pos_embed.pos_freqs
    with torch.device("meta"):
        module = QwenImageTransformer2DModel(**TRANSFORMER)
    assert module.pos_embed.pos_freqs.is_meta, "diffusers now keeps them real: restore_position_tables is not needed"
    restore_position_tables(module)
    assert torch.equal(module.pos_embed.pos_freqs, plain)


def test_attention_backends_are_tried_before_they_are_used() -> None:
    on_cpu: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "head_dim": 32}
    assert resolve_attention("auto", masked=True, **on_cpu) == "native"
    assert resolve_attention("_native_math", masked=True, **on_cpu) == "_native_math"
    refused = {
        "flash": "flash-attn",
        "natve": "did you mean 'native'",
        "flash_hub": "downloads",
        "_native_cudnn": "auto",
    }
    for name, hint in refused.items():
        with pytest.raises(SettingsError, match=hint):
            resolve_attention(name, masked=False, **on_cpu)
