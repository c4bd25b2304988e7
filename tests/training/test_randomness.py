"""What a step trains on, and with which noise, is the same however the step is split over ranks and micro-batches."""

from __future__ import annotations

import pytest
import torch

from qwen_edit_zero.edit_data.batches.schedule import SampleSchedule, micro_batches
from qwen_edit_zero.edit_model.flow import FlowMatching
from qwen_edit_zero.settings.models import FlowSettings

BUCKETS = ["wide"] * 29 + ["tall"] * 17  # 12 divides neither: every epoch has short steps
SHAPE = (16, 4, 4)
SCHEDULER = {"base_shift": 0.5, "max_shift": 0.9, "base_image_seq_len": 256, "max_image_seq_len": 8192}
Draws = list[tuple[int, float, bytes]]


def draws_of_step(step: int, *, ranks: int, micro: int) -> Draws:
    """(sample, sigma, noise) of all samples that any rank computes in a step, fillers left out."""
    plan = SampleSchedule(BUCKETS, seed=5, global_size=12).step(step)
    flow = FlowMatching(FlowSettings(), SCHEDULER, seed=5)
    drawn: Draws = []
    for rank in range(ranks):
        for batch in micro_batches(plan, rank=rank, world_size=ranks, micro_size=micro):
            if batch.filler:
                continue
            draw = flow.draw([f"sample {i}" for i in batch.indices], plan.epoch, SHAPE)
            noise = [tensor.numpy().tobytes() for tensor in draw.noise]
            drawn += zip(batch.indices, draw.sigma.tolist(), noise, strict=True)
    return sorted(drawn)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_every_split_of_a_step_draws_the_same_samples_sigmas_and_noise(ranks: int) -> None:
    steps = range(SampleSchedule(BUCKETS, seed=5, global_size=12).steps_per_epoch + 2)  # into the second epoch
    whole = [draws_of_step(step, ranks=1, micro=12) for step in steps]
    for micro in (1, 2, 3, 5):
        assert [draws_of_step(step, ranks=ranks, micro=micro) for step in steps] == whole


def test_a_sample_gets_another_sigma_and_noise_in_every_epoch_and_differs_from_others() -> None:
    flow = FlowMatching(FlowSettings(), SCHEDULER, seed=5)
    draws = [flow.draw([name], epoch, SHAPE) for name in ("a", "b") for epoch in range(3)]
    assert len({float(draw.sigma[0]) for draw in draws}) == 6
    assert len({tuple(draw.noise.flatten().tolist()) for draw in draws}) == 6
    assert torch.equal(draws[0].noise, flow.draw(["b", "a"], 0, SHAPE).noise[1:])
