"""What `qwen-edit-zero data normalise` and `data safety` show: of one instruction, or of all of a manifest."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from tqdm import tqdm

from qwen_edit_zero.assets import demo_manifest
from qwen_edit_zero.edit_data.instructions.prepare import Instructions, Prepared, Tally
from qwen_edit_zero.edit_data.manifests.opening import open_manifest
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.settings.models import DataSettings

DEMO, STANDARD_INPUT = "demo", "-"
_FILE_ENDINGS = (".jsonl", ".json", ".csv", ".toml", ".parquet", ".tar")
_FIRST = 20  # rows shown without --all


def show_normalised(what: Sequence[str], *, rules: Path | None, everything: bool) -> int:
    """Print each instruction before and after, with the rules; then counts. Returns the exit status, 0."""
    instructions = Instructions(DataSettings(normalise=rules or True))
    tally, not_shown = Tally(), 0
    for where, text in _texts(what):
        prepared = instructions.prepare(text)
        tally.add(prepared)
        if where and prepared.text == text and not prepared.withheld:
            continue
        if where and tally.changed > _FIRST and not everything:
            not_shown += 1
            continue
        print(_normalised_lines(where, prepared))
    _end(tally.lines() if tally.instructions > 1 else [], not_shown, "changed")
    return 0


def show_safety(what: Sequence[str], *, rules: Path | None, everything: bool) -> int:
    """Print what the filter finds, then counts. Returns the exit status: 2 if data.safety=block would refuse any."""
    instructions = Instructions(DataSettings(safety="block", safety_rules=rules))
    tally, found, not_shown = Tally(), 0, 0
    for where, text in _texts(what):
        prepared = instructions.prepare(text)
        tally.add(prepared)
        if where and not prepared.findings:
            continue
        found += bool(prepared.findings)
        if where and found > _FIRST and not everything:
            not_shown += 1
            continue
        print(_safety_lines(where, prepared))
    tally.changes.clear()  # chat markup made harmless: not asked about
    counts = [f"something is found in {found:,} of {tally.instructions:,} instructions", *tally.lines()[1:]]
    _end(counts if tally.instructions > 1 else [], not_shown, "found")
    return 2 if tally.refused else 0


def _texts(what: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Each instruction, with the row that it is of; "" for one that was given itself."""
    for one in what:
        if one == STANDARD_INPUT:
            yield from ((f"line {i}", line.rstrip("\n")) for i, line in enumerate(sys.stdin, 1) if line.strip())
        elif one == DEMO or os.path.exists(one) or one.endswith(_FILE_ENDINGS):
            table = open_manifest(demo_manifest("train") if one == DEMO else one, on_error="skip")
            if len(table.refused):
                print(f"{table.name}: {len(table.refused):,} rows cannot be used and are not looked at")
            for sample in tqdm(table, unit="row", delay=5, disable=not sys.stderr.isatty(), file=sys.stderr):
                yield f"line {sample.line}", sample.instruction
                yield from ((f"line {sample.line}, paraphrase", text) for text in sample.paraphrases)
        else:
            yield "", one


def _normalised_lines(where: str, prepared: Prepared) -> str:
    lines = [
        *([where] if where else []),
        f"  before  {_plain(prepared.original)}",
        f"  after   {_plain(prepared.text)}",
    ]
    lines += [f"    {c.rule}: {shown(c.before)} -> {shown(c.after)}" for c in prepared.changes]
    lines += [f"    {name} would have changed a quotation or a number, and did not apply" for name in prepared.withheld]
    if prepared.text == prepared.original:
        lines[-1 if not prepared.withheld else -1 - len(prepared.withheld)] = "  after   (the same)"
    return "\n".join(lines)


def _safety_lines(where: str, prepared: Prepared) -> str:
    lines = [*([where] if where else []), f"  {_plain(prepared.original)}"]
    lines += [
        f"    {'blocked' if found.level == 'block' else 'flagged'} by {found}, character {found.start + 1}"
        for found in prepared.findings
    ]
    return "\n".join(lines if prepared.findings else [*lines, "    nothing found"])


def _end(counts: Sequence[str], not_shown: int, what: str) -> None:
    if not_shown:
        print(f"{not_shown:,} more {what}; --all shows them")
    if counts:
        print("\n".join(counts))


def _plain(text: str) -> str:
    """On one line, control characters visible."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
