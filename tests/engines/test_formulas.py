"""What docs/engines.md says of memory and traffic is what the engines do; the benchmarks count, this compares."""

from __future__ import annotations

import pytest

from benchmarks.engines import memory, wire


@pytest.mark.slow
def test_memory_of_a_rank_is_that_of_the_formulas_within_a_percent() -> None:
    (table,) = memory.measure()
    assert len(table.rows) > 20
    for row in table.rows:
        assert abs(float(str(row[-1]).rstrip("%"))) < 1.0, row


@pytest.mark.slow
def test_bytes_on_the_wire_are_exactly_those_of_the_formulas() -> None:
    table = wire.measure()[0]
    counted = [row for row in table.rows if row[5]]
    assert len(counted) > 10
    assert all(row[-1] == "exact" for row in counted), counted
