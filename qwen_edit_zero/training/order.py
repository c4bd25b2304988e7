"""Which samples a run's steps have, by its settings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.edit_data.batches.cost import SampleCosts
from qwen_edit_zero.edit_data.batches.distribution import Distribution
from qwen_edit_zero.edit_data.batches.repeats import repeats
from qwen_edit_zero.edit_data.batches.schedule import RULE, SampleSchedule
from qwen_edit_zero.settings.models import Settings


@dataclass(frozen=True)
class SampleOrder:
    """The steps of a run.

    Attributes:
        schedule: which samples each step has.
        distribution: how categories share them.
        loss_weights: (n,) factor of each sample's loss; None: 1.
        costs: what samples cost, by which steps are divided over ranks.
        global_size: samples of a full step.
    """

    schedule: SampleSchedule
    distribution: Distribution
    loss_weights: npt.NDArray[np.float32] | None
    costs: SampleCosts
    global_size: int

    def announce(self, say: Callable[[str], None]) -> None:
        """Tell what will be drawn, if that is not each sample once an epoch; and if many steps will not be full."""
        if self.distribution.repeated:
            say("\n".join(["samples of an epoch, on average:", *self.distribution.table()]))
        filling = self.schedule.filling
        if filling.is_poor:
            size = filling.short_draws / filling.short_steps
            say(
                f"short steps: {filling.short_draws / filling.draws:.0%} of an epoch's samples are in "
                f"{filling.short_steps:,} steps of {size:.1f} of {self.global_size:,} samples on average, and an epoch "
                f"has {filling.steps:,} steps where {filling.fewest:,} would be full: a step is of one bucket, and "
                f"there are {filling.buckets:,}. Cut the pictures to fewer aspects (`qwen-edit-zero data check` lists "
                "buckets), or lower batch.global_size"
            )


def sample_order(
    settings: Settings,
    *,
    bucket_codes: npt.NDArray[np.integer],
    image_tokens: npt.NDArray[np.int64],
    category_codes: npt.NDArray[np.int32],
    categories: Sequence[str],
    weights: npt.NDArray[np.float32],
    text_tokens: npt.NDArray[np.integer] | None,
    width: int,
) -> SampleOrder:
    """The order of samples.

    Args:
        bucket_codes: (n,) bucket of each sample, as index in `image_tokens`.
        image_tokens: tokens of target and references together, of each bucket.
        category_codes: (n,) category of each sample, as index in `categories`; "" names those without one.
        weights: (n,) the rows' weights.
        text_tokens: (n,) length of each sample's prompt embedding, if it is known.
        width: of the transformer.

    Raises:
        DataError: data.balance names a category that no sample has.
    """
    data = settings.data
    repeat = data.weights == "repeat"
    how_often = repeats(category_codes, categories, balance=data.balance, weights=weights if repeat else None)
    schedule = SampleSchedule(
        bucket_codes, seed=settings.run.seed, global_size=settings.batch.global_size, repeats=how_often
    )
    return SampleOrder(
        schedule,
        Distribution(schedule, how_often, category_codes, categories),
        None if repeat else weights,
        SampleCosts(width, image_tokens, bucket_codes, text_tokens),
        settings.batch.global_size,
    )


def order_identity(settings: Settings) -> dict[str, Any]:
    """What, beside data, seed and global batch size, decides which samples a step has; compared when a run goes on."""
    balance = settings.data.balance
    return {
        "rule": RULE,
        "balance": balance if isinstance(balance, str) else dict(sorted(balance.items())),
        "weights": settings.data.weights,
    }
