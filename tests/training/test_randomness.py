"""What a step trains on, and with which noise, is the same however the step is split over ranks and micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qwen_edit_zero.edit_data.batches.repeats import repeats
from qwen_edit_zero.edit_data.batches.schedule import SampleSchedule
from qwen_edit_zero.edit_data.batches.split import share_of_step
from qwen_edit_zero.edit_model.flow import FlowMatching
from qwen_edit_zero.settings.models import FlowSettings

BUCKETS = np.repeat(np.array([0, 1], np.int32), (29, 17))  # 12 divides neither: every epoch has short steps
CATEGORIES = np.array([i % 9 != 0 for i in range(46)], np.int32)  # "remove" and "add"
SHAPE = (16, 4, 4)
SCHEDULER = {"base_shift": 0.5, "max_shift": 0.9, "base_image_seq_len": 256, "max_image_seq_len": 8192}
Draws = list[tuple[int, int, float, bytes]]


def schedule(balance: str) -> SampleSchedule:
    how_often = repeats(CATEGORIES, ["remove", "add"], balance=balance)  # type: ignore[arg-type]
    return SampleSchedule(BUCKETS, seed=5, global_size=12, repeats=how_often)


def draws_of_step(balance: str, step: int, *, ranks: int, micro: int) -> Draws:
    """(sample, draw, sigma, noise) of all samples that any rank computes in a step, fillers left out."""
    plan = schedule(balance).step(step)
    flow = FlowMatching(FlowSettings(), SCHEDULER, seed=5)
    drawn: Draws = []
    for rank in range(ranks):
        for batch in share_of_step(plan, rank=rank, world_size=ranks, micro_size=micro).micro_batches:
            if batch.filler:
                continue
            draw = flow.draw([f"sample {i}" for i in batch.indices], plan.epoch, SHAPE, batch.draws)
            noise = [tensor.numpy().tobytes() for tensor in draw.noise]
            drawn += zip(batch.indices, batch.draws, draw.sigma.tolist(), noise, strict=True)
    return sorted(drawn)


@pytest.mark.parametrize("balance", ["none", "uniform"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_every_split_of_a_step_draws_the_same_samples_sigmas_and_noise(ranks: int, balance: str) -> None:
    steps = range(schedule(balance).steps_per_epoch + 2)  # into the second epoch
    whole = [draws_of_step(balance, step, ranks=1, micro=12) for step in steps]
    for micro in (1, 2, 3, 5):
        assert [draws_of_step(balance, step, ranks=ranks, micro=micro) for step in steps] == whole


def test_a_sample_that_comes_twice_in_an_epoch_has_another_noise_each_time() -> None:
    steps = range(schedule("uniform").steps_per_epoch)
    drawn = [draw for step in steps for draw in draws_of_step("uniform", step, ranks=1, micro=12)]
    assert len({sample for sample, *_ in drawn}) < len(drawn)
    assert len({noise for *_, noise in drawn}) == len({sigma for *_, sigma, _ in drawn}) == len(drawn)


def test_a_sample_gets_another_sigma_and_noise_in_every_epoch_and_differs_from_others() -> None:
    flow = FlowMatching(FlowSettings(), SCHEDULER, seed=5)
    draws = [flow.draw([name], epoch, SHAPE) for name in ("a", "b") for epoch in range(3)]
    assert len({float(draw.sigma[0]) for draw in draws}) == 6
    assert len({tuple(draw.noise.flatten().tolist()) for draw in draws}) == 6
    assert torch.equal(draws[0].noise, flow.draw(["b", "a"], 0, SHAPE).noise[1:])


def test_the_first_draw_of_an_epoch_is_what_it_was_before_samples_could_be_repeated() -> None:
    flow = FlowMatching(FlowSettings(), SCHEDULER, seed=5)
    assert torch.equal(flow.draw(["a"], 1, SHAPE).noise, flow.draw(["a"], 1, SHAPE, [0]).noise)
    assert float(flow.draw(["a"], 1, SHAPE).sigma[0]) == pytest.approx(0.7166669, abs=1e-6)
