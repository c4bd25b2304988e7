"""`plan --sweep`: a row for each point, and what no sweep can be."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from qwen_edit_zero.commands.plan import plan
from qwen_edit_zero.errors import UserError
from qwen_edit_zero.planning.advice.sweep import parse_axes, sweep, sweep_table
from qwen_edit_zero.planning.hardware.clusters import parse_gpus
from qwen_edit_zero.planning.jobs.wish import Wish

FULL = Path(__file__).parents[2] / "recipes" / "full_finetune.yaml"


def rows(*axes: str, gpus: str = "8xA100-80", overrides: tuple[str, ...] = ()) -> list[tuple[int, int, float]]:
    """(batch, peak bytes, samples a second at best) of each point."""
    wish = Wish(FULL, overrides, None, None, parse_gpus(gpus))
    found = []
    for row in sweep(wish, parse_axes(axes)):
        assert row.plan is not None
        assert row.plan.timing is not None
        found.append(
            (row.plan.job.settings.batch.global_size, row.plan.memory.peak[1], row.plan.timing.samples_per_s[1])
        )
    return found


def test_more_gpus_need_less_memory_each_and_have_a_sample_each() -> None:
    found = rows("gpus=4,8,64,1024")
    assert [batch for batch, _, _ in found] == [64, 64, 64, 1024]
    peaks = [peak for _, peak, _ in found]
    assert peaks == sorted(peaks, reverse=True)
    rates = [rate for _, _, rate in found]
    assert rates == sorted(rates)


def test_larger_pictures_and_more_of_them_need_more_memory_and_time() -> None:
    found = rows("area=512,1024", "references=1,3")
    assert len(found) == 4
    (_, a, fast), (_, b, _), (_, c, _), (_, d, slow) = found
    assert a < b < d
    assert a < c < d
    assert fast > slow


def test_points_that_cannot_be_have_a_note_instead() -> None:
    wish = Wish(FULL, ("engine.shard_size=8",), None, None, parse_gpus("8xA100-80"))
    text = sweep_table(sweep(wish, parse_axes(["gpus=4,16"])))
    assert "[1] engine.shard_size 8 (override) does not divide 4 ranks" in text
    assert "yes" in text


def test_json_has_a_plan_a_point_and_nothing_fitting_ends_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(FULL), "--gpus", "8xA100-80", "--sweep", "gpus=1,8", "--json"]
    assert plan(arguments) == 0
    one, eight = json.loads(capsys.readouterr().out)
    assert (one["point"], one["plan"]["verdict"]) == ({"gpus": 1}, "does not fit")
    assert (eight["plan"]["ranks"], eight["plan"]["fits"]) == (8, True)
    assert plan([str(FULL), "--gpus", "8xA100-80", "--sweep", "gpus=1"]) == 2
    assert capsys.readouterr().out.splitlines()[1].split()[4] == "no"


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ([], "needs an axis"),
        (["gpu=8"], "did you mean gpus"),
        (["gpus=8", "gpus=16"], "is given twice"),
        (["gpus="], "is no whole number"),
        (["gpus=8,,16"], "is no whole number"),
        (["area=8.5"], "is no whole number"),
        (["gpus=0"], "is no whole number from 1"),
        (["text_tokens=" + ",".join(map(str, range(1, 100))), "references=1,2,3,4,5,6"], "more than 500 rows"),
        (["gpus=12"], "no whole nodes of 8"),
    ],
)
def test_malformed_sweeps_are_told(axes: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        plan([str(FULL), "--gpus", "8xA100-80", "--sweep", *axes])


def test_the_plot_has_a_line_for_each_combination(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.svg"
    arguments = [str(FULL), "--gpus", "8xA100-80", "--sweep", "gpus=8,16,32", "area=512,1024", "--svg", str(file)]
    assert plan(arguments) == 0
    assert f"written: {file}" in capsys.readouterr().out
    drawn = ElementTree.parse(file).getroot()
    lines = [element for element in drawn if element.tag.endswith("polyline")]
    assert [len(line.attrib["points"].split()) for line in lines] == [3, 3]
    assert "area 1,024" in file.read_text(encoding="utf-8")
    with pytest.raises(UserError, match="cannot be written"):
        plan([*arguments[:-1], str(tmp_path / "no" / "where.svg")])
