"""Measurements of others beside predictions, and the page that shows them."""

from __future__ import annotations

import pytest

from benchmarks.planner import folklore
from benchmarks.planner.evidence import PAGE, with_tables
from qwen_edit_zero.planning.evidence.published import Measurement, not_modelled, predict, published, rates

BAD = {"musubi-fp8-swap-45", "qflux-fsdp-two", "flymyai-48"}  # docs/plan_evidence.md says why


def test_there_is_enough_to_compare_with() -> None:
    assert len(published()) >= 12
    assert len({one.name for one in published()}) == len(published())
    assert all(one.source and one.setup for one in published())
    assert not_modelled()
    assert rates()


@pytest.mark.parametrize("one", published(), ids=lambda one: one.name)
def test_predictions_are_near_what_was_measured(one: Measurement) -> None:
    said = predict(one)
    if one.memory is not None and one.name not in BAD:
        assert said.memory_error == pytest.approx(0, abs=0.25)
    if one.seconds is not None:
        assert said.seconds_error == pytest.approx(0, abs=0.15)
    if one.fits is not None and one.name not in BAD:
        assert said.fits is one.fits


def test_what_everybody_knows_is_as_the_page_says() -> None:
    trained = folklore.as_dict(folklore.trained_table())
    peaks = [float(row["peak of a GPU"].split()[0]) for row in trained.values()]
    assert peaks == sorted(peaks, reverse=True)
    assert trained["all but the modulation layers"]["arithmetic"] == "100%"
    assert int(trained["LoRA, rank 32"]["arithmetic"].rstrip("%")) > 80
    by_mode = {tuple(row[:2]): row[2:] for row in folklore.precision_table()[1:]}
    assert by_mode["FSDP2", "bf16"][0] == by_mode["FSDP2", "fp32"][0]
    half, whole = (float(by_mode["FSDP2", mode][1].split()[0]) for mode in ("bf16", "fp32"))
    assert half == pytest.approx(whole / 2, rel=0.1)


def test_the_page_has_the_tables_that_the_planner_makes() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_tables(page) == page, "run: python -m benchmarks.planner.evidence"
