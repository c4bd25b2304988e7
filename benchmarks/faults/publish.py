"""python -m benchmarks.faults.publish [FOLDER]: put a campaign's table and picture into docs/staying_alive.md."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from benchmarks.faults import report

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- campaign -->\n", "<!-- end of campaign -->"


def publish(folder: Path) -> None:
    """Replace what lies between the marks in the document, and the picture. Raises ValueError if there are none."""
    found = json.loads((folder / "faults.json").read_text(encoding="utf-8"))
    document = ROOT / "docs" / "staying_alive.md"
    text = document.read_text(encoding="utf-8")
    table = report.markdown(found).split("\n", 2)[2]  # without its title
    new, count = re.subn(f"(?s)({BEGIN}).*({END})", lambda match: match[1] + table + match[2], text)
    if count != 1:
        raise ValueError(f"{document} has no place for a campaign")
    document.write_text(new, encoding="utf-8")
    report.picture(found, ROOT / "docs" / "images" / "faults.png")


if __name__ == "__main__":
    publish(Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "runs" / "benchmarks" / "faults"))
