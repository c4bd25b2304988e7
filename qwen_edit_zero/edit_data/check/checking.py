"""A whole check: every row examined, duplicates found, all of it counted, and the clean manifest written."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from qwen_edit_zero.edit_data.check.clean import write_clean
from qwen_edit_zero.edit_data.check.columns import ACCEPTED, REFUSED, WARNED, RowColumns
from qwen_edit_zero.edit_data.check.duplicates import (
    same_samples,
    same_targets,
    targets_that_are_sources,
    usable_rows,
)
from qwen_edit_zero.edit_data.check.findings import EXAMPLES, Finding, FindingLog, Found, about
from qwen_edit_zero.edit_data.check.processes import examine_all
from qwen_edit_zero.edit_data.check.rows import CheckJob
from qwen_edit_zero.edit_data.check.rules import NewRules
from qwen_edit_zero.edit_data.check.summary import Summary, summarise
from qwen_edit_zero.edit_data.manifests.table import SampleTable
from qwen_edit_zero.edit_data.pictures.alignment import Align

FINDINGS, CLEAN = "findings.jsonl", "clean.jsonl"


class Bar(Protocol):
    """Shows how work goes."""

    def advance(self, units: int = 1, text: str = "") -> None:
        """Count units as done; `text` says how it goes."""

    def close(self) -> None:
        """Nothing more comes."""


NewBar = Callable[[str, int], Bar]


@dataclass(frozen=True)
class Asked:
    """What is to be checked, and by what.

    Attributes:
        references: most reference pictures of a sample.
        new_rules: how rows are judged; picklable.
        area, align: data.vae_area and data.align.
        step: samples of an optimizer step.
        tokens: whether lengths of instructions are counted in tokens.
        cache: folder in which is remembered what was found out about pictures.
        out: folder for the results.
        strict: rows with warnings are left out of the clean manifest, too.
        workers: processes; see `examine_all`.
        with_wrong_rows: whether rows that are wrong in themselves count; they have no split, and are told once.
        more: what else is found, by the columns, when all rows have been examined.
        then: is given the columns last, before they are deleted.
    """

    table: SampleTable
    references: int
    new_rules: NewRules
    area: int
    align: Align
    step: int
    tokens: bool
    cache: Path
    out: Path
    strict: bool = False
    workers: int | None = None
    with_wrong_rows: bool = True
    more: Callable[[RowColumns], Iterable[Finding]] | None = None
    then: Callable[[RowColumns], None] | None = None


@dataclass(frozen=True)
class Checked:
    """The result of a check.

    Attributes:
        rows: all of the manifest that were taken, those that are wrong in themselves too.
        accepted: without any warning; warned: that are trained on all the same; refused: the rest.
        found: kinds of findings, worst first.
        clean_rows: in the clean manifest; `outside`: what data.outside must allow for it.
        pictures: of all rows; decoded: of them, now.
        seconds: that the examination took.
    """

    table: SampleTable
    rows: int
    accepted: int
    warned: int
    refused: int
    found: list[Found]
    summary: Summary
    out: Path
    clean_rows: int
    outside: list[str]
    pictures: int
    decoded: int
    seconds: float

    def exit_status(self, *, strict: bool) -> int:
        """0: clean. 1: rows are left out, or warnings. 2: no row is left; with `strict` also instead of 1."""
        if self.accepted + self.warned == 0:
            return 2
        if self.refused or self.warned:
            return 2 if strict else 1
        return 0


def check_table(asked: Asked, new_bar: NewBar) -> Checked:
    """Check a table, and write `FINDINGS` and `CLEAN` into a folder.

    Raises:
        StorageError: a store does not answer.
        RunError: the classifier of instructions fails.
        OSError: the results cannot be written.
    """
    table = asked.table
    asked.out.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=".columns-", dir=asked.out))
    log_path = asked.out / f".{FINDINGS}.{os.getpid()}"
    try:
        columns = RowColumns(work, len(table), asked.references, new=True)
        job = CheckJob(table, asked.references, asked.cache, work, asked.new_rules)
        with FindingLog(log_path) as log:
            refused_rows = table.refused if asked.with_wrong_rows else ()
            log.add(Finding("row", -1, r.line, r.where or f"line {r.line}", r.id, r.reason) for r in refused_rows)
            pictures, decoded, seconds = _examine(job, log, asked.workers, new_bar)
            _note_duplicates(table, columns, log)
            if asked.more is not None:
                log.add(asked.more(columns))
            summary = summarise(
                table, columns, area=asked.area, align=asked.align, step=asked.step, tokens=asked.tokens,
                examples=EXAMPLES,
            )  # fmt: skip
            rare = (_about_row("rare-bucket", row, table, "few samples have its sizes") for row in summary.rare)
            log.note("rare-bucket", summary.rare_rows, rare)
        os.replace(log_path, asked.out / FINDINGS)
        bar = new_bar("writing the clean manifest", len(table))
        try:
            written, outside = write_clean(
                table, columns, asked.out / CLEAN, strict=asked.strict, advance=lambda rows: bar.advance(rows)
            )
        finally:
            bar.close()
        states = np.bincount(columns.state, minlength=4).tolist()
        if asked.then is not None:
            asked.then(columns)
        return Checked(
            table=table,
            rows=len(table) + len(refused_rows),
            accepted=states[ACCEPTED],
            warned=states[WARNED],
            refused=states[REFUSED] + len(refused_rows),
            found=log.ordered(),
            summary=summary,
            out=asked.out,
            clean_rows=written,
            outside=outside,
            pictures=pictures,
            decoded=decoded,
            seconds=seconds,
        )
    finally:
        log_path.unlink(missing_ok=True)
        shutil.rmtree(work, ignore_errors=True)


def _examine(job: CheckJob, log: FindingLog, workers: int | None, new_bar: NewBar) -> tuple[int, int, float]:
    """(pictures, decoded now, seconds)."""
    bar = new_bar("looking at rows", len(job.table))
    pictures = decoded = 0
    begun = time.monotonic()
    try:
        for examined in examine_all(job, workers):
            log.add(examined.findings)
            pictures += examined.pictures
            decoded += examined.decoded
            found = f"{log.count('refused'):,} refused, {log.count('warning'):,} warnings"
            rate = pictures / max(time.monotonic() - begun, 1e-3)
            bar.advance(examined.rows, f"{rate:,.0f} pictures/s, {found}")
    finally:
        bar.close()
    return pictures, decoded, time.monotonic() - begun


def _note_duplicates(table: SampleTable, columns: RowColumns, log: FindingLog) -> None:
    rows = usable_rows(columns)

    def again() -> Iterator[Finding]:
        for row, earlier, all_same in _sorted(same_samples(columns, rows), 3):
            columns.state[row] = WARNED
            other = table[earlier]
            of = f"{table.where(other.line)} (id {other.id})"
            text = (
                f"the same as {of}" if all_same else f"references and instruction are those of {of}, the target is not"
            )
            yield _about_row("twice" if all_same else "contradiction", row, table, text)

    def copies() -> Iterator[Finding]:
        for row, earlier in _sorted(same_targets(columns, rows), 2):
            other = table[earlier]
            yield _about_row("same-target", row, table, f"its target is that of {table.where(other.line)} too")

    log.add(again())
    log.add(copies())
    both = targets_that_are_sources(columns, rows)
    text = "its target is a source of another row"
    log.note(
        "target-is-source", len(both), (_about_row("target-is-source", int(r), table, text) for r in both[:EXAMPLES])
    )


def _sorted(found: Iterable[tuple[int, ...]], width: int) -> Iterator[tuple[int, ...]]:
    """In the order of rows; 8 bytes a number while they are collected."""
    numbers = array("q")
    for each in found:
        numbers.extend(each)
    table = np.frombuffer(numbers, np.int64).reshape(-1, width)
    yield from (tuple(each.tolist()) for each in table[np.argsort(table[:, 0], kind="stable")])


def _about_row(kind: str, row: int, table: SampleTable, text: str) -> Finding:
    sample = table[row]
    return about(kind, row, sample, table.where(sample.line), text)
