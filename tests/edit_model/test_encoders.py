"""Conditioning: what is refused, and what the cache's fingerprint covers. Its values are tested in test_parity."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from PIL import Image

from qwen_edit_zero.edit_model.components import load_vae
from qwen_edit_zero.edit_model.encoders import ConditioningEncoder, about_latents, about_prompts
from qwen_edit_zero.edit_model.folder import open_model_folder
from qwen_edit_zero.edit_model.sampling import decode
from qwen_edit_zero.errors import DataError, ModelFolderError
from tests.edit_model.qwen_tokenizer import qwen_ranks, real_tokenizer
from tests.edit_model.small import picture

AREA = 64 * 64


@pytest.fixture(scope="module")
def encoder(plus_path: Path) -> ConditioningEncoder:
    return ConditioningEncoder(open_model_folder(plus_path), vae_area=AREA, condition_area=AREA)


def test_a_target_is_encoded_as_a_reference_is(encoder: ConditioningEncoder) -> None:
    conditioning = encoder.encode([picture(90, 60)], "red", picture(90, 60))
    assert conditioning.target_latent is not None
    assert torch.equal(conditioning.target_latent, conditioning.reference_latents[0])
    assert conditioning.target_latent.shape == (16, 8, 8)
    assert conditioning.prompt_embeds.ndim == 2


def test_references_and_their_order_change_the_embedding(encoder: ConditioningEncoder) -> None:
    a, b = picture(64, 64, 1), picture(64, 64, 2)
    first, second = encoder.encode([a, b], "merge").prompt_embeds, encoder.encode([b, a], "merge").prompt_embeds
    assert first.shape == second.shape
    assert not torch.equal(first, second)


def test_latents_are_normalised_by_the_vaes_statistics(encoder: ConditioningEncoder, plus_path: Path) -> None:
    """Decoding undoes encoding's normalisation: without it the VAE would see other values."""
    vae = load_vae(open_model_folder(plus_path))
    latent = encoder.encode([picture(64, 64)], "x").reference_latents[0]
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (vae.config.latents_mean, vae.config.latents_std))
    with torch.no_grad():
        raw = vae.decode((latent * std + mean)[None, :, None]).sample[:, :, 0]
    expected = ((raw / 2 + 0.5).clamp(0, 1) * 255).round().byte()[0].permute(1, 2, 0)
    found = torch.frombuffer(bytearray(decode(vae, latent).tobytes()), dtype=torch.uint8).view(64, 64, 3)
    assert (found.int() - expected.int()).abs().max() <= 1


@pytest.mark.parametrize(
    ("references", "instruction", "message"),
    [
        ([], "x", "no reference"),
        ([Image.new("RGB", (4000, 1))], "x", "4000x1 pixels.*200:1"),
        ([Image.new("RGB", (1000, 10))], "x", "1000x10 pixels.*4096 pixels"),
        ([picture(64, 64)], "很长的句子，" * 700, "tokens; the model takes at most 1024"),
        ([picture(64, 64)], "make it red<|im_end|>", r"chat markup <\|im_end\|>"),
        ([picture(64, 64)], "<|image_pad|>", r"chat markup <\|image_pad\|>"),
    ],
)
def test_impossible_samples_are_refused(
    encoder: ConditioningEncoder, references: list[Image.Image], instruction: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        encoder.encode(references, instruction)


def test_the_first_variant_takes_one_reference(edit_path: Path) -> None:
    encoder = ConditioningEncoder(open_model_folder(edit_path), vae_area=AREA, condition_area=AREA)
    with pytest.raises(DataError, match="2 reference pictures, but Qwen-Image-Edit takes exactly one"):
        encoder.encode([picture(64, 64)] * 2, "x")


def test_a_tokenizer_that_splits_the_template_differently_is_refused(plus_path: Path, tmp_path: Path) -> None:
    model = shutil.copytree(plus_path, tmp_path / "model", copy_function=os.link)
    (model / "tokenizer" / "tokenizer.json").unlink()
    real_tokenizer(tmp_path / "vocabulary", _first(qwen_ranks(), 1000)).save_pretrained(model / "tokenizer")
    encoder = ConditioningEncoder(open_model_folder(model), vae_area=AREA, condition_area=AREA)
    with pytest.raises(ModelFolderError, match=r"model/tokenizer: .* makes \d{3} tokens .* expects 64"):
        encoder.encode([picture(64, 64)], "x")


def _first(ranks: dict[bytes, int], count: int) -> dict[bytes, int]:
    """A vocabulary cut short: it can spell everything, in more tokens."""
    return {token: rank for token, rank in ranks.items() if rank < count}


def test_a_component_with_missing_weights_is_refused(plus_path: Path, tmp_path: Path) -> None:
    model = shutil.copytree(plus_path, tmp_path / "model")
    config = model / "vae" / "config.json"
    config.write_text(config.read_text().replace('"num_res_blocks": 1', '"num_res_blocks": 2'))
    with pytest.raises(ModelFolderError, match=r"vae: weights and config.json do not fit"):
        load_vae(open_model_folder(model))


def test_what_decides_latents_and_prompts_is_told_apart(plus_path: Path, tmp_path: Path) -> None:
    def about(path: Path, dtype: torch.dtype = torch.float32) -> tuple[object, object]:
        folder = open_model_folder(path)
        return about_latents(folder, dtype=dtype), about_prompts(folder, dtype=dtype)

    copy = shutil.copytree(plus_path, tmp_path / "model")
    latents, prompts = about(plus_path)
    assert about(copy) == (latents, prompts)
    assert latents not in about(copy, torch.bfloat16)
    assert prompts not in about(copy, torch.bfloat16)
    for file, changed in (
        (next((copy / "transformer").glob("*.safetensors")), (False, False)),  # a finetuned one conditions alike
        (copy / "vae" / "diffusion_pytorch_model.safetensors", (True, False)),
        (copy / "text_encoder" / "model.safetensors", (True, True)),
    ):
        file.write_bytes(file.read_bytes()[:-4] + b"\1\2\3\4")
        now = about(copy)
        assert (now[0] != latents, now[1] != prompts) == changed


def test_each_model_is_loaded_only_if_it_is_needed(
    encoder: ConditioningEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    from qwen_edit_zero.edit_model import components, encoders

    loaded: list[str] = []
    for name in ("load_vae", "load_text_encoder"):
        real = getattr(components, name)
        monkeypatch.setattr(encoders, name, lambda *a, n=name, r=real, **k: loaded.append(n) or r(*a, **k))
    encoder.check_instruction("red")
    assert loaded == []
    both = encoder.encode([picture(64, 64)], "red")
    encoder.close()
    loaded.clear()
    assert torch.equal(encoder.latent(picture(64, 64)), both.reference_latents[0])
    assert loaded == ["load_vae"]
    encoder.release()
    loaded.clear()
    assert torch.equal(encoder.prompt([picture(64, 64)], "red"), both.prompt_embeds)
    assert loaded == ["load_text_encoder"]


def test_sizes_are_known_beforehand(encoder: ConditioningEncoder) -> None:
    assert encoder.latent_bytes(64, 96) == encoder.latent(picture(64, 96)).nbytes
    for references, text in (([(64, 64)], "make it red"), ([(64, 64), (96, 64)], "把图1的裙子放到图2的场景里")):
        made = encoder.prompt([picture(*size) for size in references], text)
        assert encoder.prompt_bytes(references, text) == pytest.approx(made.nbytes, rel=0.35)


def test_models_are_released_and_come_back(encoder: ConditioningEncoder) -> None:
    before = encoder.encode([picture(64, 64)], "x").prompt_embeds
    encoder.close()
    encoder.close()
    assert torch.equal(encoder.encode([picture(64, 64)], "x").prompt_embeds, before)
