"""Every file of the cases has its outcome, and the documentation's table says what happens."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.edit_data.builders import CASES
from tests.edit_data.picture_cases import TABLE, Case, document, outcome

HANDED_DOWN = CASES.parents[3] / "shared" / "cases"  # where the cases came from, if that is here


@pytest.mark.parametrize("case", TABLE, ids=lambda case: case.file)
def test_each_case_ends_as_it_must(case: Case) -> None:
    found = outcome(case)
    if case.refusal is None:
        assert found == "right"
    else:
        assert found.startswith("refused: ")
        assert case.refusal in found


@pytest.mark.parametrize("root", [CASES, *([HANDED_DOWN] if HANDED_DOWN.is_dir() else [])])
def test_every_file_is_in_the_table(root: Path) -> None:
    listed = {case.file for case in TABLE}
    files = {
        str(path.relative_to(root))
        for part in ("images", "names", "pairs")
        for path in (root / part).rglob("*")
        if path.is_file()
    }
    assert files == listed - {"pairs/target_is_directory/target.png"}  # which is a folder


def test_the_documentation_lists_what_happens() -> None:
    text = (CASES.parents[2] / "docs/picture_cases.md").read_text(encoding="utf-8")
    assert document() == text, "run: python -m tests.edit_data.picture_cases docs/picture_cases.md"
    assert " 0 wrong." in text
