"""The loss of a sample is its own, whatever it is batched with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qwen_edit_zero.edit_model.flow import FlowDraw, velocity
from qwen_edit_zero.edit_model.inputs import pack, transformer_inputs, unpack
from qwen_edit_zero.edit_model.loss import flow_losses, token_weights
from tests.edit_model.small import random_transformer

LENGTHS = (9, 23, 17)


def batch(seed: int = 0) -> dict[str, Any]:
    """Three samples with two references each and prompts of different lengths, padded."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    count, longest = len(LENGTHS), max(LENGTHS)
    mask = torch.arange(longest)[None] < torch.tensor(LENGTHS)[:, None]
    return {
        "target_latents": randn(count, 16, 6, 8),
        "reference_latents": (randn(count, 16, 4, 6), randn(count, 16, 10, 4)),
        "prompt_embeds": randn(count, longest, 32) * mask[..., None],
        "prompt_mask": mask,
        "draw": FlowDraw(randn(count, 16, 6, 8), torch.tensor([0.1, 0.5, 0.93]), torch.tensor([1.0, 0.5, 2.0])),
    }


def alone(samples: dict[str, Any], i: int) -> dict[str, Any]:
    draw = samples["draw"]
    return {
        "target_latents": samples["target_latents"][i : i + 1],
        "reference_latents": tuple(r[i : i + 1] for r in samples["reference_latents"]),
        "prompt_embeds": samples["prompt_embeds"][i : i + 1, : LENGTHS[i]],
        "prompt_mask": None,
        "draw": FlowDraw(draw.noise[i : i + 1], draw.sigma[i : i + 1], draw.weight[i : i + 1]),
    }


def gradients(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    result = {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return result


@pytest.mark.parametrize("zero_cond_t", [False, True])
def test_a_padded_batch_gives_each_sample_the_loss_it_has_alone(zero_cond_t: bool) -> None:
    module = random_transformer(zero_cond_t=zero_cond_t)
    samples = batch()
    together = flow_losses(module, **samples)
    together.sum().backward()
    gradient = gradients(module)
    losses = [flow_losses(module, **alone(samples, i)) for i in range(len(LENGTHS))]
    torch.cat(losses).sum().backward()
    expected = gradients(module)
    assert together.dtype == torch.float32
    assert torch.allclose(together, torch.cat(losses), rtol=2e-6, atol=0)
    assert gradient.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(gradient[name], value, rtol=1e-3, atol=1e-5 * value.abs().max().item()), name


def test_the_padding_mask_matters() -> None:
    """The same batch without its mask gives other losses: the test above would notice a mask that is ignored."""
    module = random_transformer()
    samples = batch()
    masked, unmasked = flow_losses(module, **samples), flow_losses(module, **(samples | {"prompt_mask": None}))
    assert masked[1].item() == pytest.approx(unmasked[1].item(), rel=1e-6)  # the longest has no padding
    assert (masked - unmasked)[[0, 2]].abs().min() > 1e-5


def test_predicting_the_velocity_costs_nothing_and_the_weight_scales() -> None:
    samples = batch()
    target = pack(velocity(samples["target_latents"], samples["draw"].noise))

    def oracle(offset: float) -> Any:
        def forward(**inputs: Any) -> tuple[torch.Tensor]:
            rest = inputs["hidden_states"][:, target.shape[1] :]  # the references' part must not count
            return (torch.cat([target + offset, 100 * rest], dim=1),)

        return forward

    assert torch.equal(flow_losses(oracle(0.0), **samples), torch.zeros(3))
    weight = samples["draw"].weight
    assert torch.allclose(flow_losses(oracle(0.5), **samples), 0.25 * weight)


def test_half_precision_output_is_compared_in_fp32() -> None:
    module = random_transformer()
    samples = batch()

    def forward(**inputs: Any) -> tuple[torch.Tensor]:
        return (module(**inputs)[0].bfloat16(),)

    losses = flow_losses(forward, **samples)
    assert losses.dtype == torch.float32
    assert torch.allclose(losses, flow_losses(module, **samples), rtol=1e-2)


def test_references_stay_clean_and_in_order() -> None:
    noisy, first, second = torch.randn(2, 16, 4, 4), torch.randn(2, 16, 6, 4), torch.randn(2, 16, 2, 8)
    inputs = transformer_inputs(noisy, [first, second], torch.randn(2, 5, 32), None, torch.tensor([0.2, 0.4]))
    assert inputs["img_shapes"] == [[(1, 2, 2), (1, 3, 2), (1, 1, 4)]] * 2
    parts = inputs["hidden_states"].split([4, 6, 4], dim=1)
    for part, latent in zip(parts, (noisy, first, second), strict=True):
        assert torch.equal(unpack(part, (latent.shape[2], latent.shape[3])), latent)
    assert inputs["timestep"].tolist() == pytest.approx([0.2, 0.4])


def test_the_last_blocks_text_output_gets_no_gradient() -> None:
    """Which parameters never get one is a property of the model that engines and checkpoints must cope with."""
    module = random_transformer()
    flow_losses(module, **batch()).sum().backward()
    unused = {name for name, p in module.named_parameters() if p.grad is None}
    assert unused == {f"transformer_blocks.1.{part}.{kind}" for kind in ("weight", "bias")
                      for part in ("attn.to_add_out", "txt_mlp.net.0.proj", "txt_mlp.net.2")}  # fmt: skip


def test_a_mask_moves_the_loss_to_its_tokens_by_the_formula() -> None:
    """Token weights 1 + (w - 1) m with m the mean over 2x2 cells, scaled to mean 1 over each sample."""
    mask = torch.zeros(3, 4, 6)
    mask[1, :2, :2] = 1.0  # one token of six
    mask[1, 2, 2] = 1.0  # a quarter of another
    mask[2] = 1.0
    raw = torch.ones(3, 6)
    raw[1, 0], raw[1, 4], raw[2] = 5.0, 2.0, 5.0
    assert torch.allclose(token_weights(mask, 5.0), raw / raw.mean(dim=1, keepdim=True))
    samples = batch()
    target = pack(velocity(samples["target_latents"], samples["draw"].noise))
    error = torch.randn(target.shape, generator=torch.Generator().manual_seed(1))

    def forward(**inputs: Any) -> tuple[torch.Tensor]:
        rest = inputs["hidden_states"][:, target.shape[1] :]
        return (torch.cat([target + error, rest], dim=1),)

    mask = torch.rand(3, 6, 8, generator=torch.Generator().manual_seed(2))
    weights = token_weights(mask, 3.0)
    found = flow_losses(forward, **samples, mask=mask, mask_weight=3.0)
    assert torch.allclose(found, (error.square().mean(2) * weights).mean(1) * samples["draw"].weight, rtol=1e-4)
    assert torch.allclose(flow_losses(forward, **samples, mask=mask), flow_losses(forward, **samples))
