"""The tiny model is a real Qwen-Image-Edit-2509 in small: same classes, same conditioning, a VAE that works."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus as edit_plus
import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from qwen_edit_zero.assets import asset_path
from tests.tiny.demo import read

TRAIN, VALIDATION = read("train"), read("validation")
HELD_OUT_PSNR = 31.4  # measured 32.4 dB; see docs/demo_data.md


def pixels(paths: list[Path]) -> torch.Tensor:
    """(B, 3, 128, 128) in [-1, 1]."""
    arrays = np.stack([np.asarray(Image.open(p).convert("RGB")) for p in paths])
    return torch.from_numpy(arrays).permute(0, 3, 1, 2).float() / 127.5 - 1


def squares(paths: set[Path]) -> list[Path]:
    return [p for p in sorted(paths) if Image.open(p).size == (128, 128)]


def test_size_and_schedule(pipeline: Any) -> None:
    assert 5e6 < sum(p.numel() for p in pipeline.transformer.parameters()) < 10e6
    assert pipeline.vae_scale_factor == 8
    config = pipeline.scheduler.config
    assert (config.base_shift, config.max_shift, config.max_image_seq_len, config.shift_terminal) == (
        0.5,
        0.9,
        8192,
        0.02,
    )


def test_the_template_prefix_is_64_tokens_before_every_instruction(pipeline: Any) -> None:
    prefix = pipeline.prompt_template_encode.split("{}")[0]
    for tokenizer in (pipeline.tokenizer, pipeline.processor.tokenizer):
        start = tokenizer(prefix).input_ids
        assert len(start) == 64
        for t in TRAIN + VALIDATION:
            shown = "".join(
                f"Picture {i}: <|vision_start|><|image_pad|><|vision_end|>" for i in range(1, len(t.sources) + 1)
            )
            ids = tokenizer(pipeline.prompt_template_encode.format(shown + t.instruction)).input_ids
            assert ids[:64] == start
            assert tokenizer.convert_ids_to_tokens(ids[64]) == "Picture"
            assert max(ids) < pipeline.text_encoder.config.text_config.vocab_size


def test_any_text_survives_the_tokenizer(pipeline: Any) -> None:
    text = "把猫变成 a 龘 dragon 🐉, naïve?"
    assert pipeline.tokenizer.decode(pipeline.tokenizer(text).input_ids) == text


@pytest.mark.parametrize("references", [1, 2, 3])
def test_the_pipeline_edits_pictures(pipeline: Any, monkeypatch: pytest.MonkeyPatch, references: int) -> None:
    monkeypatch.setattr(edit_plus, "CONDITION_IMAGE_SIZE", 56 * 56)
    monkeypatch.setattr(edit_plus, "VAE_IMAGE_SIZE", 128 * 128)
    triplet = next(t for t in VALIDATION if len(t.sources) == references)

    def edit(instruction: str, pictures: list[Image.Image]) -> np.ndarray[Any, Any]:
        seed = torch.Generator().manual_seed(0)
        result = pipeline(
            pictures, instruction, negative_prompt=" ", height=96, width=160, num_inference_steps=2, generator=seed
        ).images[0]
        assert result.size == (160, 96)
        return np.asarray(result, dtype=float)

    first = edit(triplet.instruction, triplet.pictures())
    assert first.std() > 5
    assert np.abs(edit("反相 something else", triplet.pictures()) - first).max() > 0
    others = [picture.rotate(90) for picture in triplet.pictures()]
    assert np.abs(edit(triplet.instruction, others) - first).max() > 0


def test_embeddings_tell_instructions_apart(pipeline: Any) -> None:
    picture = TRAIN[0].pictures()[0].resize((64, 64))
    seen = list(dict.fromkeys(t.instruction for t in TRAIN if len(t.sources) == 1))[:40]
    with torch.no_grad():
        embeds = [pipeline.encode_prompt(text, [picture])[0][0] for text in seen]
    assert all(e.square().mean(-1).sqrt().min() > 0.5 and e.square().mean(-1).sqrt().max() < 2 for e in embeds)
    means = torch.stack([e.mean(0) for e in embeds])
    distance = torch.cdist(means, means) + 9 * torch.eye(len(seen))
    assert distance.min() > 0.1 * means.norm(dim=-1).mean()


def test_held_out_pictures_survive_the_vae(pipeline: Any) -> None:
    paths = squares({p for t in VALIDATION for p in (*t.sources, t.target)})
    x = pixels(paths[::3])
    with torch.no_grad():
        z = pipeline.vae.encode(x.unsqueeze(2)).latent_dist.mode()
        out = pipeline.vae.decode(z).sample[:, :, 0]
    psnr = -10 * ((out - x) / 2).square().mean(dim=(1, 2, 3)).log10()
    assert psnr.mean() > HELD_OUT_PSNR, psnr


def test_training_latents_are_normalised(pipeline: Any) -> None:
    paths = squares({p for t in TRAIN for p in (*t.sources, t.target)})
    with torch.no_grad():
        z = pipeline._encode_vae_image(pixels(paths[::12]).unsqueeze(2), None)
    per_channel = z.transpose(0, 1).flatten(1)
    assert per_channel.mean(1).abs().max() < 0.5
    assert (per_channel.std(1) - 1).abs().max() < 0.4


def test_the_vae_equals_the_flat_network_that_was_trained(pipeline: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "tools"))
    from image_vae import ImageVAE  # type: ignore[import-not-found]

    names = ("base_dim", "z_dim", "dim_mult", "num_res_blocks")
    flat = ImageVAE(**{name: pipeline.vae.config[name] for name in names})
    weights = load_file(asset_path("tiny/vae/last_time_slice.safetensors"))
    flat.load_state_dict({name: value.float() for name, value in weights.items()})
    x = pixels(squares({t.target for t in VALIDATION})[:2])
    with torch.no_grad():
        z = pipeline.vae.encode(x.unsqueeze(2)).latent_dist.mode()
        assert torch.allclose(flat.encode(x)[0], z[:, :, 0], rtol=0, atol=1e-4 * float(z.abs().max()))
        decoded = pipeline.vae.decode(z).sample[:, :, 0]
        assert torch.allclose(flat.decode(z[:, :, 0]).clamp(-1, 1), decoded, rtol=0, atol=1e-3)
    sys.modules.pop("image_vae", None)


def test_every_weight_of_the_transformer_can_learn(pipeline: Any) -> None:
    """Except those behind the last block's text output, which the architecture throws away."""
    model = pipeline.transformer
    generator = torch.Generator().manual_seed(0)
    out = model(
        hidden_states=torch.randn(1, 32, 64, generator=generator),
        encoder_hidden_states=torch.randn(1, 7, 192, generator=generator),
        timestep=torch.tensor([0.5]),
        img_shapes=[[(1, 4, 4), (1, 4, 4)]],
    ).sample
    out.square().mean().backward()
    last = f"transformer_blocks.{len(model.transformer_blocks) - 1}."
    idle = {n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    model.zero_grad(set_to_none=True)
    allowed = (last + "attn.to_add_out", last + "txt_mlp", last + "attn.norm_added_q", last + "attn.add_q_proj")
    assert all(name.startswith(allowed) for name in idle), idle
