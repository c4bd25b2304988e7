"""What docs/instructions.md shows is true: its table of canonical forms, and its files of rules."""

from __future__ import annotations

import re
from pathlib import Path

from qwen_edit_zero.edit_data.instructions.normalise import Normaliser
from qwen_edit_zero.edit_data.instructions.safety import SafetyFilter
from tests.end_to_end.commands import ROOT

PAGE = (ROOT / "docs" / "instructions.md").read_text(encoding="utf-8")


def test_the_table_of_canonical_forms() -> None:
    normaliser = Normaliser()
    table = PAGE.partition("| written | becomes |")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| (.+) \| (.+) \|$", table, re.MULTILINE)
    assert len(rows) == 6
    for written, becomes in rows:
        for text in written.split(", "):
            assert normaliser.normalise(text).text == becomes


def test_the_files_of_rules(tmp_path: Path) -> None:
    normal, safety = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    path = tmp_path / "rules.yaml"
    path.write_text(normal, encoding="utf-8")
    own = Normaliser(path)
    assert own.normalise("give the car a matte look，换成靛青").text == "Make the car matte，请将颜色改为靛青色"
    path.write_text(safety, encoding="utf-8")
    assert [found.rule for found in SafetyFilter(path).find("nude a.c.m.e")] == ["competitor", "nudity"]
