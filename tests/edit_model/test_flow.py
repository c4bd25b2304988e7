"""Noise levels, shift and weights follow their formulas, and draws depend on the sample alone."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling

from qwen_edit_zero.edit_model.components import load_scheduler
from qwen_edit_zero.edit_model.flow import (
    FlowMatching,
    bell_weight,
    draw_sigma,
    mix,
    sample_generator,
    shift,
    shift_factor,
    velocity,
)
from qwen_edit_zero.edit_model.folder import open_model_folder
from qwen_edit_zero.settings.models import FlowSettings
from tests.edit_model.small import SCHEDULER

SHAPE = (16, 8, 8)


def sigmas(count: int = 20_000, **settings: Any) -> torch.Tensor:
    flow = FlowSettings(**settings)
    generator = torch.Generator().manual_seed(0)
    return torch.tensor([draw_sigma(flow, generator) for _ in range(count)], dtype=torch.float64)


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest gap between the two empirical distribution functions (Kolmogorov and Smirnov)."""
    values = torch.cat([a, b]).sort().values
    cdf = [torch.searchsorted(x.sort().values, values, right=True) / len(x) for x in (a, b)]
    return (cdf[0] - cdf[1]).abs().max().item()


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({"sigma_distribution": "logit_normal", "logit_mean": 0.5, "logit_std": 0.7}, ("logit_normal", 0.5, 0.7, 0)),
        ({"sigma_distribution": "mode", "mode_scale": 1.29}, ("mode", 0, 1, 1.29)),
        ({"sigma_distribution": "uniform"}, ("none", 0, 1, 0)),
    ],
)
def test_distributions_are_those_of_diffusers(ours: dict[str, Any], theirs: tuple[str, float, float, float]) -> None:
    scheme, mean, std, mode_scale = theirs
    torch.manual_seed(1)
    expected = compute_density_for_timestep_sampling(scheme, 20_000, mean, std, mode_scale).double()
    assert distance(sigmas(**ours), expected) < 0.02  # two samples of 20,000 exceed it once in a thousand times
    assert distance(sigmas(**ours), expected.square()) > 0.1


def test_logit_normal_by_formula() -> None:
    logits = torch.logit(sigmas(logit_mean=-0.4, logit_std=1.5))
    assert logits.mean().item() == pytest.approx(-0.4, abs=0.04)
    assert logits.std().item() == pytest.approx(1.5, abs=0.04)


def test_the_dynamic_shift_is_read_from_the_configuration(plus_path: Path) -> None:
    config = open_model_folder(plus_path).scheduler_config
    assert shift_factor("dynamic", config, target_tokens=4096) == pytest.approx(2.001, abs=5e-4)
    fallback = {"use_dynamic_shifting": True}
    assert shift_factor("dynamic", fallback, target_tokens=4096) == pytest.approx(3.158, abs=5e-4)


@pytest.mark.parametrize("time_shift_type", ["exponential", "linear"])
@pytest.mark.parametrize("tokens", [16, 1024, 4096, 9000])
def test_the_shift_is_the_schedulers(time_shift_type: str, tokens: int) -> None:
    scheduler = FlowMatchEulerDiscreteScheduler(**(SCHEDULER | {"time_shift_type": time_shift_type}))
    mu = 0.5 + (tokens - 256) * (0.9 - 0.5) / (8192 - 256)
    factor = shift_factor("dynamic", scheduler.config, target_tokens=tokens)
    for sigma in (1e-4, 0.2, 0.5, 0.9, 1 - 1e-4):
        expected = scheduler.time_shift(mu, 1.0, torch.tensor(sigma, dtype=torch.float64)).item()
        assert shift(sigma, factor) == pytest.approx(expected, rel=1e-12)


def test_other_shift_rules() -> None:
    assert shift_factor("none", SCHEDULER, target_tokens=4096) == 1
    assert shift_factor(3.0, SCHEDULER, target_tokens=4096) == 3
    assert shift(0.5, 3.0) == 0.75
    constant = {"use_dynamic_shifting": False, "shift": 2.5}
    assert shift_factor("dynamic", constant, target_tokens=4096) == 2.5


def test_only_target_tokens_count_for_the_shift() -> None:
    flow = FlowMatching(FlowSettings(), SCHEDULER, seed=0)
    plain = FlowMatching(FlowSettings(shift="none"), SCHEDULER, seed=0)
    for shape in (SHAPE, (16, 128, 128)):
        odds = [(s / (1 - s)).item() for s in (flow.draw(["a"], 0, shape).sigma, plain.draw(["a"], 0, shape).sigma)]
        tokens = shape[1] * shape[2] // 4
        assert odds[0] / odds[1] == pytest.approx(shift_factor("dynamic", SCHEDULER, target_tokens=tokens), rel=1e-4)


def test_the_bell_has_mean_one_and_vanishes_at_the_ends() -> None:
    sigma = torch.linspace(0, 1, 100_001, dtype=torch.float64)
    weight = bell_weight(sigma)
    t = 1000 * sigma
    by_recipe = torch.exp(-2 * ((t - 500) / 1000) ** 2)
    by_recipe = by_recipe - by_recipe.min()
    by_recipe = by_recipe / by_recipe.mean()
    assert torch.allclose(weight, by_recipe, rtol=1e-4, atol=1e-6)
    assert weight[0].item() == pytest.approx(0, abs=1e-12)


def test_a_draw_depends_on_seed_sample_and_epoch_alone() -> None:
    flow = FlowMatching(FlowSettings(weighting="bell"), SCHEDULER, seed=3)
    together = flow.draw(["a", "b", "猫"], 2, SHAPE)
    for i, name in enumerate(["a", "b", "猫"]):
        torch.manual_seed(i)  # the global generator has no say
        alone = FlowMatching(FlowSettings(weighting="bell"), SCHEDULER, seed=3).draw([name], 2, SHAPE)
        for field in ("noise", "sigma", "weight"):
            assert torch.equal(getattr(alone, field)[0], getattr(together, field)[i])
    others = [flow.draw(["a"], 3, SHAPE), FlowMatching(FlowSettings(), SCHEDULER, seed=4).draw(["a"], 2, SHAPE)]
    assert len({draw.sigma.item() for draw in (flow.draw(["a"], 2, SHAPE), flow.draw(["b"], 2, SHAPE), *others)}) == 4
    assert together.sigma.dtype == together.noise.dtype == torch.float32


def test_streams_are_pinned() -> None:
    """A changed hash would silently change every later epoch of runs in progress."""
    value = torch.rand((), dtype=torch.float64, generator=sample_generator(0, "sample", 1)).item()
    assert value == pytest.approx(0.7739202297171439, abs=1e-15)


def test_sigma_does_not_depend_on_the_pictures_size() -> None:
    flow = FlowMatching(FlowSettings(shift="none"), SCHEDULER, seed=0)
    assert flow.draw(["a"], 0, SHAPE).sigma == flow.draw(["a"], 0, (16, 16, 24)).sigma


def test_the_path_runs_straight_from_picture_to_noise() -> None:
    z, e = torch.randn(3, *SHAPE), torch.randn(3, *SHAPE)
    sigma = torch.tensor([0.0, 1.0, 0.25])
    x = mix(z, e, sigma)
    assert torch.equal(x[0], z[0])
    assert torch.equal(x[1], e[1])
    assert torch.allclose(x - sigma.view(-1, 1, 1, 1) * velocity(z, e), z, atol=1e-6)
    half = mix(z.bfloat16(), e, sigma)
    assert half.dtype == torch.float32


def test_sigma_stays_inside_the_open_interval() -> None:
    extreme = FlowMatching(FlowSettings(logit_mean=80.0, shift=100.0), SCHEDULER, seed=0)
    assert 0 < extreme.draw(["a"], 0, SHAPE).sigma.item() < 1
    low = FlowMatching(FlowSettings(logit_mean=-80.0, shift=0.01), SCHEDULER, seed=0)
    assert 0 < low.draw(["a"], 0, SHAPE).sigma.item() < 1
    assert math.isfinite(shift(0.0, 2.0))


def test_the_released_scheduler_configuration_survives_loading(plus_path: Path) -> None:
    config = load_scheduler(open_model_folder(plus_path)).config
    assert {key: config[key] for key in SCHEDULER} == SCHEDULER
