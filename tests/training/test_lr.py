"""The learning rate that users read in the metrics is the one the formulas give."""

import math

import pytest

from qwen_edit_zero.settings.models import ScheduleSettings
from qwen_edit_zero.training.lr import lr_at


def rates(schedule: ScheduleSettings, total: int = 10) -> list[float]:
    return [lr_at(step, peak=2.0, total_steps=total, schedule=schedule) for step in range(total)]


def test_warmup_rises_linearly_and_reaches_the_peak() -> None:
    assert rates(ScheduleSettings(kind="constant", warmup_steps=4))[:5] == [0.5, 1.0, 1.5, 2.0, 2.0]


@pytest.mark.parametrize("kind", ["cosine", "linear"])
def test_decay_starts_at_the_peak_and_ends_at_the_final_fraction(kind: str) -> None:
    found = rates(ScheduleSettings(kind=kind, warmup_steps=3, final_fraction=0.1))
    assert found[3] == 2.0
    assert found[-1] == pytest.approx(0.2, rel=1e-12)
    assert found[3:] == sorted(found[3:], reverse=True)


def test_cosine_is_half_way_at_the_middle() -> None:
    found = rates(ScheduleSettings(kind="cosine"), total=11)
    assert found[5] == pytest.approx(1.0, rel=1e-12)
    assert found[1] == pytest.approx(1.0 + math.cos(math.pi / 10), rel=1e-12)


def test_warmup_longer_than_the_run_never_divides_by_zero() -> None:
    assert len(rates(ScheduleSettings(kind="cosine", warmup_steps=100))) == 10
