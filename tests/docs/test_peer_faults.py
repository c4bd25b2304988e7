"""The tables of faults under other tools say what was measured."""

from __future__ import annotations

import pytest

from benchmarks.peer_faults.bench import tidy
from benchmarks.peer_faults.faults import FAULTS
from benchmarks.peer_faults.results import read
from benchmarks.peer_faults.table import PAGES, ROWS, cell_text, shown, tables


@pytest.mark.parametrize("name", PAGES)
def test_the_pages_show_the_tables_made_of_the_results(name: str) -> None:
    assert shown(PAGES[name].read_text(encoding="utf-8"), name) == tables(read())[name]


def test_the_table_has_a_row_for_every_fault() -> None:
    assert set(ROWS) == set(FAULTS)


def test_a_job_that_stays_is_not_told_as_one_that_ended() -> None:
    assert cell_text("stop_rank", {"left": 3, "left_ranks": 1, "reached": 14}) == "**still there after 120 s**"
    assert cell_text("stop_rank", {"seconds": 31.2, "left": 0, "status": 1}) == "31 s, status 1"


def test_a_start_that_fails_after_the_fault_is_not_told_as_a_resume() -> None:
    assert (
        cell_text("truncated_checkpoint", {"resume_status": 1, "reached": 14}) == "**does not start again** (status 1)"
    )


def test_lines_of_output_lose_what_is_of_one_machine_and_time() -> None:
    assert tidy("[2026-01-02 03:04:05,678] /home/me/x/job.py: \x1b[31mbad") == "[] .../job.py: bad"
