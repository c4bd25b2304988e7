"""What training says of the order of samples when it starts."""

from __future__ import annotations

import numpy as np
import pytest

from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.training.order import sample_order


def announced(bucket_sizes: list[int], global_size: int) -> list[str]:
    buckets = np.repeat(np.arange(len(bucket_sizes), dtype=np.int32), bucket_sizes)
    count = len(buckets)
    order = sample_order(
        Settings.model_validate({"run": {"max_steps": 1}, "batch": {"global_size": global_size}}),
        bucket_codes=buckets,
        image_tokens=np.full(len(bucket_sizes), 64),
        category_codes=np.zeros(count, np.int32),
        categories=[""],
        weights=np.ones(count, np.float32),
        text_tokens=None,
        width=64,
    )
    said: list[str] = []
    order.announce(said.append)
    return said


def test_many_small_buckets_are_told_in_one_line_that_says_what_to_do() -> None:
    (line,) = announced([16, 3, 5, 1, 7], global_size=16)
    assert line == (
        "short steps: 50% of an epoch's samples are in 4 steps of 4.0 of 16 samples on average, and an epoch has 5 "
        "steps where 2 would be full: a step is of one bucket, and there are 5. Cut the pictures to fewer aspects "
        "(`qwen-edit-zero data check` lists buckets), or lower batch.global_size"
    )


@pytest.mark.parametrize(
    ("bucket_sizes", "global_size", "is_told"),
    [
        ([32, 48, 16], 16, False),
        ([5], 16, False),  # smaller than a step, but no bucket's fault
        ([320, 323], 16, False),  # half a percent in one short step
        ([40, 40], 16, True),  # 20 % of the samples in two steps
        ([16] * 8 + [1] * 3, 16, True),  # few samples, but eleven steps for nine
    ],
)
def test_it_is_told_from_a_tenth_of_the_samples_or_a_fifth_more_steps_on(
    bucket_sizes: list[int], global_size: int, is_told: bool
) -> None:
    assert bool(announced(bucket_sizes, global_size)) == is_told
