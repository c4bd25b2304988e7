"""The tables made of results.json: `python benchmarks/peer_faults/table.py` writes them into their pages."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])

from benchmarks.peer_faults.results import read

ROOT = Path(__file__).resolve().parents[2]
ROWS = {
    "term_launchers": "SIGTERM to the launchers",
    "term_ranks": "SIGTERM to the ranks",
    "kill_rank": "SIGKILL of rank 0",
    "kill_remote_rank": "SIGKILL of rank 1, on the other node",
    "kill_with_restarts": "the same, `--max-restarts 1`",
    "stop_rank": "SIGSTOP of rank 1",
    "cut_cable": "cable pulled",
    "kill_in_save": "all killed in a save",
    "truncated_checkpoint": "newest checkpoint's largest file cut to half",
    "full_disk": "disk full at a save",
    "nan_loss": "NaN loss in one step",
    "two_starts": "started twice in one folder",
    "other_ranks": "resumed by 1 rank, not 2",
    "other_setting": "another `lr` on node 2",
}
RESUMED = ("kill_in_save", "truncated_checkpoint", "other_ranks")  # what counts is how the next start ends
TELLING = ("kill_remote_rank", "stop_rank", "cut_cable", "full_disk", "two_starts", "other_setting", *RESUMED)
COLUMNS = ("torchrun", "accelerate", "lightning", "deepspeed", "ours", "ours_deepspeed")
MARK = "<!-- made by benchmarks/peer_faults/table.py: {} -->"
PAGES = {"faults": ROOT / "docs" / "launch.md", "words": Path(__file__).with_name("README.md")}


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Markdown by the name of the table: what happened, and the last line that each printed."""
    columns = [results[name] for name in COLUMNS if name in results]
    titles = [_title(column) for column in columns]
    head = ["| " + " | ".join(["fault", *titles]) + " |", "|" + "---|" * (len(columns) + 1)]
    rows = [
        "| " + " | ".join([text, *(cell_text(fault, c["cells"].get(fault)) for c in columns)]) + " |"
        for fault, text in ROWS.items()
    ]
    return {"faults": "\n".join([*head, *rows]), "words": "\n".join(_words(columns))}


def _words(columns: list[dict[str, Any]]) -> list[str]:
    lines = ["| fault | tool | last line |", "|---|---|---|"]
    for fault in TELLING:
        for column in columns:
            cell = column["cells"].get(fault, {})
            line = cell.get("resume_line") or cell.get("rank_line", "")
            status = cell.get("resume_status") if fault in RESUMED else cell.get("status")
            if line and status != 0:
                lines.append(f"| {ROWS[fault]} | {column['title']} | `{_plain(line)}` |")
    return lines


def cell_text(fault: str, cell: dict[str, Any] | None) -> str:
    """A cell in a few words."""
    if cell is None:
        return ""
    own = {
        "kill_with_restarts": _restarted, "nan_loss": _nan, "two_starts": _twice, "other_setting": _other_setting,
        "full_disk": _full_disk, "stop_rank": _end, "cut_cable": _end, "truncated_checkpoint": _resume,
        "other_ranks": _other_ranks, "kill_in_save": _resume,
    }  # fmt: skip
    if fault in own:
        return own[fault](cell)
    return f"{_end(cell)}; {_resume(cell)}"


def _end(cell: dict[str, Any]) -> str:
    if "seconds" in cell:
        return f"{cell['seconds']:.0f} s, status {cell.get('status')}"
    launcher = f"{cell.get('launcher_seconds', 120):.0f} s, status {cell['status']}" if "status" in cell else ""
    if cell.get("left_ranks", cell["left"]) == 0:
        return f"{launcher}; after 120 s a launcher is left on node 2"
    return f"**still there after 120 s**{f' (first launcher: {launcher})' if launcher else ''}"


def _resume(cell: dict[str, Any]) -> str:
    if "next start hangs" in cell.get("note", ""):
        return "**the next start hangs**"
    if cell.get("resume_status") != 0 or "resumed" not in cell:
        return f"**does not start again** (status {cell.get('resume_status')})"
    again = "starts over" if cell["resumed"] == 0 else f"{cell['lost']} lost"
    return f"{again}, {_result(cell)}"


def _result(cell: dict[str, Any]) -> str:
    samples = "" if cell.get("same_samples", True) else "**other samples**, "
    return f"{samples}{'same' if cell.get('same_weights') else 'other'} weights"


def _restarted(cell: dict[str, Any]) -> str:
    if "status" not in cell and "seconds" not in cell and not cell.get("left"):
        return "no such option"
    if cell.get("status") != 0:
        return f"not restarted: {_end(cell)}"
    return f"restarted, {cell['lost']} lost, {_result(cell)}"


def _nan(cell: dict[str, Any]) -> str:
    if cell.get("finite") is False:
        return f"status {cell.get('status')}, **all weights NaN**"
    return f"step skipped, status {cell.get('status')}" if cell.get("finite") else _end(cell)


def _twice(cell: dict[str, Any]) -> str:
    twice, _, first = cell.get("note", "0; ").partition("; ")
    if int(twice.split()[0]):
        return f"**both train** in one folder; {first}"
    if re.search("corrupted|StreamReader", cell.get("rank_line", "")):
        return f"second fails on a checkpoint being written; {first}"
    return f"second refused, status {cell['status']}; {first}" if "status" in cell else f"second waits; {first}"


def _full_disk(cell: dict[str, Any]) -> str:
    if cell.get("status") == 0:
        return f"status 0, {_result(cell)}"
    return f"{_end(cell)}; {_resume(cell)}"


def _other_ranks(cell: dict[str, Any]) -> str:
    if cell.get("resume_status") != 0:
        return _resume(cell)
    return f"{cell['note']}, {'same' if cell.get('same_samples') else '**other**'} samples; {cell['lost']} lost"


def _other_setting(cell: dict[str, Any]) -> str:
    if cell.get("reached"):
        models = int(cell.get("note", "0").split()[0])
        return f"**trains to the end**, {'nodes with different weights' if models > 1 else 'one model by both values'}"
    return f"refused before the first step, status {cell['status']}"


def _title(column: dict[str, Any]) -> str:
    version = next(iter(column["versions"].values())).split("+")[0]
    return column["title"] if "project" in column["title"] else f"{column['title']} {version}"


def _plain(line: str) -> str:
    line = re.sub(r"^\S*\.\.\./\S+:\d+\] ", "", line)  # where in a library's source it comes from
    return line.replace("|", "/").replace("`", "'")


def shown(page: str, name: str) -> str:
    """The table of this name in a page's text."""
    mark = MARK.format(name)
    return page.split(mark)[1].strip()


def main() -> int:
    """Write the tables into their pages, between two marks each."""
    for name, table in tables(read()).items():
        page, mark = PAGES[name], MARK.format(name)
        before, _, after = page.read_text(encoding="utf-8").split(mark)
        page.write_text(f"{before}{mark}\n{table}\n{mark}{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
