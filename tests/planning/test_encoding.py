"""What the planner says of the VAE and the text encoder against the real classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

from qwen_edit_zero.engines.precision import DTYPES
from qwen_edit_zero.planning.jobs.job import make_job
from qwen_edit_zero.planning.passes.encoding import encoding, encoding_flops, sampling
from qwen_edit_zero.planning.passes.text_encoder import RELEASED_TEXT_ENCODER, TextEncoderShape
from qwen_edit_zero.planning.passes.vae import RELEASED_VAE, VaeShape, decoding_of_picture, encoding_of_picture
from qwen_edit_zero.settings.models import Settings
from tests.planning.test_flops import CPU_ATTENTION
from tests.planning.transformers import MIDDLE, SMALL, LiveBytes, inputs_of, job, module_of

_SMALL_VAE = {"base_dim": 8, "z_dim": 16, "dim_mult": [1, 3, 4, 4], "num_res_blocks": 1,
              "temperal_downsample": [False, True, True]}  # fmt: skip


def vae_of(config: dict[str, Any], dtype: torch.dtype) -> AutoencoderKLQwenImage:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return AutoencoderKLQwenImage(**config).eval()
    finally:
        torch.set_default_dtype(before)


def check_vae(config: dict[str, Any], width: int, height: int, precision: str) -> None:
    dtype, shape = DTYPES[precision], VaeShape.from_config(config)
    vae = vae_of(config, dtype)
    latent = (1, config["z_dim"], 1, height // 8, width // 8)
    halves = [
        (vae.encode, (1, 3, 1, height, width), [vae.encoder, vae.quant_conv], encoding_of_picture),
        (vae.decode, latent, [vae.decoder, vae.post_quant_conv], decoding_of_picture),
    ]
    for run, size, modules, planned_by in halves:
        given = torch.zeros(size, dtype=dtype)
        with (
            torch.no_grad(),
            FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter,
            LiveBytes([*vae.parameters(), given]) as tracker,
        ):
            run(given, return_dict=False)
        planned = planned_by(shape, width, height, precision)
        assert planned.peak == tracker.peak + given.untyped_storage().nbytes()
        assert planned.flops == counter.get_total_flops()
        assert planned.elements == sum(p.numel() for module in modules for p in module.parameters())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_vae_takes_exactly_what_is_said(precision: str) -> None:
    """Peak of live bytes, FLOP and elements of the weights, encoding and decoding."""
    check_vae(_SMALL_VAE, 64, 48, precision)
    check_vae(_SMALL_VAE | {"num_res_blocks": 2, "dim_mult": [1, 2, 2, 2]}, 32, 64, precision)


def test_the_released_vae_takes_exactly_what_is_said_at_1024() -> None:
    """With tensors that have no values."""
    with FakeTensorMode():
        check_vae(dict(RELEASED_VAE), 1024, 1024, "bf16")


def text_encoder(dtype: torch.dtype, text: dict[str, Any], vision: dict[str, Any]) -> Any:
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 512, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 3,
            "num_attention_heads": 4, "num_key_value_heads": 2, "bos_token_id": None, "eos_token_id": None,
            "pad_token_id": None,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}, **text,
        },
        vision_config={
            "depth": 4, "hidden_size": 48, "num_heads": 3, "intermediate_size": 120, "out_hidden_size": 64,
            "fullatt_block_indexes": [1, 3], **vision,
        },
        image_token_id=7, video_token_id=8, vision_end_token_id=9, vision_start_token_id=10, tie_word_embeddings=False,
    )  # fmt: skip
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        return Qwen2_5_VLForConditionalGeneration(config).eval()
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize(
    ("text", "vision"), [({}, {}), ({"vocab_size": 4096}, {}), ({"num_hidden_layers": 5}, {"hidden_size": 24})], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_prompt_takes_what_is_said(dtype: torch.dtype, text: dict[str, Any], vision: dict[str, Any]) -> None:
    """FLOP and elements exactly, live bytes to 8 %: masks and rotary positions of the text are left out."""
    module = text_encoder(dtype, text, vision)
    for pictures, words in ([(8, 8)], 20), ([(8, 8), (6, 5)], 20), ([(3, 9)], 200):
        ids = [1] * words
        for rows, columns in pictures:
            ids += [10, *[7] * (rows * columns), 9]
        patches = 4 * sum(rows * columns for rows, columns in pictures)
        inputs = {
            "input_ids": torch.tensor([ids]),
            "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
            "pixel_values": torch.zeros(patches, 3 * 2 * 14 * 14, dtype=dtype),
            "image_grid_thw": torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in pictures]),
        }
        with (
            torch.no_grad(),
            FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter,
            LiveBytes([*module.parameters(), *module.buffers(), *inputs.values()]) as tracker,
        ):
            module(**inputs, output_hidden_states=True)
        shape = TextEncoderShape.from_config(module.config.to_dict())
        planned = shape.prompt(len(ids), pictures, dtype.itemsize)
        assert planned.flops == counter.get_total_flops()
        assert shape.elements == sum(p.numel() for p in module.parameters())
        assert planned.peak == pytest.approx(tracker.peak, rel=0.08)


def test_the_released_text_encoder_has_its_known_size() -> None:
    assert TextEncoderShape.from_config(RELEASED_TEXT_ENCODER).elements == 8_292_166_656


@pytest.mark.parametrize("engine", ["ddp", "fsdp2"])
@pytest.mark.parametrize("changes", [{}, {"lora": {"rank": 4}}], ids=str)
def test_a_forward_pass_without_gradients_takes_what_is_said(engine: str, changes: dict[str, Any]) -> None:
    """Under autocast with copies of all weights that train. To some percent: it depends on PyTorch's temporaries."""
    one = job(MIDDLE, engine=engine, **changes)
    module, inputs = module_of(one, MIDDLE), inputs_of(one, masked=False)
    module.eval()
    dtype, low = torch.bfloat16, engine == "fsdp2"
    inputs = {n: v.to(dtype) if low and isinstance(v, torch.Tensor) else v for n, v in inputs.items()}
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=not low):
        module(**inputs)  # position tables are kept from now on
    given = [v for v in inputs.values() if isinstance(v, torch.Tensor)]
    tables = [module.pos_embed.pos_freqs, module.pos_embed.neg_freqs]
    with (
        torch.no_grad(),
        LiveBytes([*module.parameters(), *tables, *given]) as tracker,
        torch.autocast("cpu", dtype, enabled=not low),
    ):
        module(**inputs)
    copies = sum(v.untyped_storage().nbytes() for v in given if v.is_floating_point()) if low else 0
    assert sampling(one, on_gpu=False).forward_peak == pytest.approx(tracker.peak + copies, rel=0.05)


def settings(path: str, precision: str = "bf16") -> Settings:
    return Settings.model_validate({"run": {"max_steps": 1}, "model": {"path": path}, "precision": precision})


def test_filling_the_cache_needs_the_text_encoder_or_the_vae_never_both() -> None:
    planned = encoding(make_job(settings("Qwen-Image-Edit-2509"), cluster_world=8, gpus_per_node=8))
    assert planned.text_encoder == 2 * 8_292_166_656
    assert planned.peak == planned.text_encoder + planned.text_encoder_peak < planned.text_encoder + planned.vae_peak
    assert planned.peak == planned.weights + planned.activations
    in_fp32 = make_job(settings("Qwen-Image-Edit-2509", "fp32"), cluster_world=8, gpus_per_node=8)
    assert encoding(in_fp32).weights == 2 * planned.weights


def test_the_first_variant_shows_its_text_encoder_more_tokens_and_tiny_has_its_own_encoders() -> None:
    flops, weights = [], []
    for path in ("Qwen-Image-Edit", "Qwen-Image-Edit-2509", "tiny"):
        one = make_job(settings(path), cluster_world=8, gpus_per_node=8)
        flops.append(encoding_flops(one))
        weights.append(encoding(one).text_encoder)
    assert flops[0] > flops[1] > flops[2]
    assert weights[0] == weights[1] > 1000 * weights[2]


def test_sample_pictures_cost_two_forward_passes_a_step_with_guidance() -> None:
    one = job(SMALL)
    plain = job(SMALL)
    object.__setattr__(plain, "settings", one.settings.model_copy(
        update={"sampling": one.settings.sampling.model_copy(update={"guidance": 1.0})}))  # fmt: skip
    with_guidance, without = sampling(one).flops, sampling(plain).flops
    decoding = 2 * without - with_guidance
    steps = one.settings.sampling.steps
    assert decoding > 0
    assert (without - decoding) % steps == 0
    assert sampling(one).peak >= sampling(one).vae
