"""The output that the documentation shows of `qwen-edit-zero plan` is what the command prints.

python -m tests.planning.test_documentation     writes it anew
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
from pathlib import Path

import pytest

from qwen_edit_zero.commands.plan import plan

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "docs" / "plan.md", ROOT / "README.md")
_SHOWN = re.compile(r"```bash\n(qwen-edit-zero plan [^\n]*)\n```\n\n```\n(.*?)```", re.DOTALL)
_REST = "...\n"  # ends an output of which only the beginning is shown


def printed(command: str, folder: Path) -> str:
    words = [str(folder / word) if word.startswith("OUT") else word for word in shlex.split(command)[2:]]
    out = io.StringIO()
    before = Path.cwd()
    os.chdir(ROOT)
    try:
        with contextlib.redirect_stdout(out):
            assert plan(words) == 0
    finally:
        os.chdir(before)
    return out.getvalue().replace(f"{folder}/", "")


def as_shown(text: str, shown: str) -> str:
    """As much of the output as is shown."""
    if not shown.endswith(_REST):
        return text
    return "".join(text.splitlines(keepends=True)[: len(shown.splitlines()) - 1]) + _REST


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_outputs_in_the_documentation_are_real(page: Path, tmp_path: Path) -> None:
    examples = _SHOWN.findall(page.read_text(encoding="utf-8"))
    assert examples
    for command, shown in examples:
        assert as_shown(printed(command, tmp_path), shown) == shown, f"{command}: see the top of {Path(__file__).name}"


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        for file in PAGES:
            old = file.read_text(encoding="utf-8")
            new = _SHOWN.sub(
                lambda found: (
                    found[0].removesuffix(f"{found[2]}```")
                    + as_shown(printed(found[1], Path(temporary)), found[2])
                    + "```"
                ),
                old,
            )
            file.write_text(new, encoding="utf-8")
