"""Balance between categories, weights as repetition, and what is told of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from qwen_edit_zero.edit_data.batches.distribution import Distribution
from qwen_edit_zero.edit_data.batches.repeats import repeats
from qwen_edit_zero.edit_data.batches.schedule import SampleSchedule
from qwen_edit_zero.errors import DataError

NAMES = ["remove", "add text", ""]
COUNTS = [16, 144, 40]
CODES = np.repeat(np.arange(3, dtype=np.int32), COUNTS)


def shares(**options: Any) -> list[float]:
    """Share of each category in the draws."""
    how_often = repeats(CODES, NAMES, **options)
    assert how_often is not None
    rates = how_often.rates[how_often.groups]
    assert rates.sum() == pytest.approx(200)
    return [float(rates[c == CODES].sum() / 200) for c in range(3)]


@pytest.mark.parametrize(
    ("balance", "expected"),
    [
        ("sqrt", [4, 12, 40**0.5]),
        ("uniform", [1, 1, 1]),
        ({"remove": 3}, [48, 144, 40]),
        ({"remove": 3, "": 0.5, "add text": 0.25}, [48, 36, 20]),
    ],
)
def test_categories_share_draws_by_the_rule(balance: Any, expected: list[float]) -> None:
    assert shares(balance=balance) == pytest.approx([e / sum(expected) for e in expected])


def test_inside_of_a_category_draws_are_in_proportion_to_weights() -> None:
    weights = np.ones(200, np.float32)
    weights[:8] = 3.0  # half of "remove"
    how_often = repeats(CODES, NAMES, balance="uniform", weights=weights)
    assert how_often is not None
    rates = how_often.rates[how_often.groups]
    assert rates[0] / rates[15] == pytest.approx(3)
    assert rates[CODES == 0].sum() == pytest.approx(200 / 3)
    assert shares(balance="none", weights=weights) == pytest.approx([32 / 216, 144 / 216, 40 / 216])


def test_where_every_sample_comes_once_there_are_no_groups() -> None:
    assert repeats(CODES, NAMES) is None
    assert repeats(CODES, NAMES, weights=np.full(200, 2.5, np.float32)) is None
    assert repeats(CODES, NAMES, balance={"remove": 1}) is None


def test_many_different_weights_are_few_groups_and_nearly_as_they_were() -> None:
    weights = np.random.default_rng(0).uniform(0.1, 10, 100_000).astype(np.float32)
    how_often = repeats(np.zeros(100_000, np.int32), [""], weights=weights)
    assert how_often is not None
    assert len(how_often.rates) < 1000
    relative = how_often.rates[how_often.groups] / (weights / weights.mean())
    assert np.abs(relative - 1).max() < 0.005


def test_a_category_that_no_sample_has_is_refused_with_the_nearest() -> None:
    with pytest.raises(DataError, match=r'data\.balance names the category "add txt".*did you mean "add text"\?'):
        repeats(CODES, NAMES, balance={"add txt": 2})
    with pytest.raises(DataError, match=r'Categories there: "remove", "add text", "" \(samples without a category\)'):
        repeats(CODES, NAMES, balance={"zzz": 2})


def test_what_is_announced_and_what_was_drawn() -> None:
    how_often = repeats(CODES, NAMES, balance="uniform")
    schedule = SampleSchedule(CODES % 2, seed=0, global_size=8, repeats=how_often)
    told = Distribution(schedule, how_often, CODES, NAMES)
    assert told.table() == [
        "  category            samples  share  drawn  times an epoch",
        "  add text                144  72.0%  33.3%           0.463",
        "  (without category)       40  20.0%  33.3%            1.67",
        "  remove                   16   8.0%  33.3%            4.17",
    ]
    for epoch in range(4):
        steps = range(schedule.steps_before_epoch(epoch), schedule.steps_before_epoch(epoch + 1))
        drawn = np.bincount(CODES[[i for s in steps for i in schedule.step(s).indices]])
        assert told.drawn(epoch) == {NAMES[c]: drawn[c] for c in (1, 2, 0)}
        assert [s for s in range(200) if told.ends_epoch(s, epoch)] == [steps.stop]
    assert told.line(0).startswith("epoch 1 drew 200 samples: add text 33.")


def test_without_balance_what_is_drawn_are_the_samples() -> None:
    schedule = SampleSchedule(CODES, seed=0, global_size=8)
    told = Distribution(schedule, None, CODES, NAMES)
    assert not told.repeated
    assert told.drawn(5) == {"add text": 144, "": 40, "remove": 16}
