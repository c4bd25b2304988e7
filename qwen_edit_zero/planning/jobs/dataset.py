"""What a manifest says of its samples without a look at pictures: references, and how long instructions are."""

from __future__ import annotations

import functools
import json
import math
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_edit_zero.assets import demo_manifest
from qwen_edit_zero.settings.models import DataSettings

_SECONDS = 0.7  # for which a manifest is read; a plan is to be there in two
_CHINESE = re.compile(r"[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]")
TOKENS_A_WORD, TOKENS_A_CHINESE_CHARACTER = 1.3, 1.0  # assumed, of Qwen's tokenizer


@dataclass(frozen=True)
class DataFacts:
    """Of the rows read.

    Attributes:
        rows: how many these are; `is_all` if no more.
        references: the most of a row.
        instruction_tokens: of the longest instruction, estimated from its words and characters.
    """

    rows: int
    is_all: bool
    references: int
    instruction_tokens: int


def data_facts(data: DataSettings) -> DataFacts | None:
    """What the manifest says, if it is JSON Lines with the usual names; None if not, for which `why_unread` has words.

    Rows that cannot be read, or have more references than allowed, do not count: training leaves them out or stops.
    """
    found = _look(data)
    return None if isinstance(found, str) else found


def why_unread(data: DataSettings) -> str:
    """Why there are no facts, for people: `data.jsonl is not here`; empty if there are."""
    found = _look(data)
    return found if isinstance(found, str) else ""


def _look(data: DataSettings) -> DataFacts | str:
    if data.columns is not None:
        return f"{data.manifest} has columns of other names (data.columns), which the planner does not read"
    if data.format not in ("auto", "jsonl"):
        return f"{data.manifest} is of data.format={data.format}, which the planner does not read"
    path = demo_manifest("train") if data.manifest == "demo" else Path(data.manifest).expanduser()
    if path.suffix not in (".jsonl", ".json"):
        return f"{data.manifest} is no .jsonl, which is all that the planner reads"
    try:
        if not path.is_file():
            return f"{data.manifest} is {'no file' if path.exists() else 'not here'}"
        about = path.stat()
        facts = _facts(path, (about.st_mtime_ns, about.st_size), data.max_references, data.max_samples)
    except OSError as error:
        return f"{data.manifest} cannot be read ({error.strerror or type(error).__name__})"
    if facts is None and about.st_size == 0:
        return f"{data.manifest} is empty"
    return facts or (
        f"no row of {data.manifest} has a source, an instruction and at most {data.max_references} references "
        "(data.max_references)"
    )


@functools.lru_cache(maxsize=64)
def _facts(path: Path, stamp: tuple[int, int], max_references: int, max_samples: int | None) -> DataFacts | None:
    with path.open(encoding="utf-8", errors="replace") as lines:
        return _read(lines, max_references, max_samples)


def _read(lines: Iterable[str], max_references: int, max_samples: int | None) -> DataFacts | None:
    until = time.monotonic() + _SECONDS
    rows = references = tokens = 0
    for number, line in enumerate(lines):
        if number % 256 == 255 and time.monotonic() > until:
            return DataFacts(rows, False, references, tokens)
        if rows == max_samples:
            break
        found = _row(line)
        if found is None or found[0] > max_references:
            continue
        rows += 1
        references, tokens = max(references, found[0]), max(tokens, found[1])
    return DataFacts(rows, True, references, tokens) if rows else None


def _row(line: str) -> tuple[int, int] | None:
    """(references, tokens of the instruction) of a row; None if it is none."""
    try:
        row: Any = json.loads(line)
        source, instruction = row["source"], row["instruction"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not isinstance(instruction, str) or not isinstance(source, str | list) or not source:
        return None
    return (1 if isinstance(source, str) else len(source)), instruction_tokens(instruction)


def instruction_tokens(text: str) -> int:
    """About how many tokens Qwen's tokenizer makes of a text."""
    chinese = len(_CHINESE.findall(text))
    words = len(_CHINESE.sub(" ", text).split())
    return math.ceil(TOKENS_A_WORD * words + TOKENS_A_CHINESE_CHARACTER * chinese)
