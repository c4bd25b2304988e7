"""RUN/measured.json with figures that cannot be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen_edit_zero.errors import UserError
from qwen_edit_zero.planning.evidence.measured import Measured, StepTimes

TIMES = StepTimes(3, 1.0, 0.9, 1.1, 2.0, 0.1)
MEASURED = Measured(
    "ddp", 2, 2, "CPU", None, {}, (4, 4), ((4, 4),), 9, 1, False, 1, 9, TIMES, {"masters": 400}, {}, {}, 0, 1
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    MEASURED.write(tmp_path / "measured.json")
    assert Measured.read(tmp_path) == MEASURED


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"ranks": 0}, "ranks is 0"),
        ({"ranks_per_node": -1}, "ranks_per_node is -1"),
        ({"state": {"masters": "many"}}, r"state\.masters is 'many'"),
        ({"target": [4]}, r"target\.1 is "),
        ({"references": 3}, "references is 3"),
        ({"times": {"count": 3}}, r"times\.median is "),
        ({"config": []}, r"config is \[\]"),
    ],
)
def test_figures_that_cannot_be_are_named(tmp_path: Path, changed: dict[str, Any], says: str) -> None:
    path = tmp_path / "measured.json"
    MEASURED.write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    with pytest.raises(UserError, match=rf"measured\.json is damaged: {says}.*train a few steps again"):
        Measured.read(tmp_path)
