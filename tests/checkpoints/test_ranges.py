"""Intersecting ranges and judging coverage, for all cuts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_edit_zero.checkpoints.ranges import Ranges, RangeTable, StoredRange, coverage_fault, intersect


@st.composite
def cuts(draw: st.DrawFn) -> tuple[int, list[StoredRange]]:
    """A tensor's element count and a cut of it into ranges, which lie in files in any order."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=12))
    ranges, start = [], 0
    for length in lengths:
        ranges.append(StoredRange(draw(st.integers(0, 3)), 1000 * start, start, length, ""))
        start += length
    return start, ranges


@given(cuts(), st.data())
def test_a_read_is_made_of_the_right_elements_in_order(cut: tuple[int, list[StoredRange]], data: st.DataObject) -> None:
    count, ranges = cut
    start = data.draw(st.integers(0, count))
    length = data.draw(st.integers(0, count - start))
    elements, at = [], 0
    for piece in intersect(ranges, start, length):
        assert piece.at == at
        assert 0 < piece.take <= piece.stored.length - piece.skip
        first = piece.stored.start + piece.skip
        elements += range(first, first + piece.take)
        at += piece.take
    assert elements == list(range(start, start + length))


@given(cuts())
def test_a_cut_covers_every_element_once(cut: tuple[int, list[StoredRange]]) -> None:
    count, ranges = cut
    assert coverage_fault(count, ranges) is None


@given(cuts(), st.data())
def test_a_cut_with_one_range_changed_does_not(cut: tuple[int, list[StoredRange]], data: st.DataObject) -> None:
    count, ranges = cut
    index = data.draw(st.integers(0, len(ranges) - 1))
    kind = data.draw(st.sampled_from(["lost", "twice", "shorter", "longer"]))
    changed = ranges[index]
    if kind == "lost":
        ranges.pop(index)
    elif kind == "twice":
        ranges.insert(index, changed)
    else:
        ranges[index] = changed._replace(length=changed.length + (1 if kind == "longer" else -1))
    assert coverage_fault(count, ranges) is not None


def test_nothing_to_cover() -> None:
    assert coverage_fault(0, []) is None
    assert coverage_fault(1, []) == "elements 0 to 0 are nowhere"


@given(cuts(), st.data())
def test_a_table_of_ranges_is_searched_as_a_list_is(cut: tuple[int, list[StoredRange]], data: st.DataObject) -> None:
    count, listed = cut
    table = RangeTable(
        np.array([7, *(r.file for r in listed), 9], np.int32),  # between rows of other tensors
        np.array([0, *(r.offset for r in listed), 0], np.int64),
        np.array([0, *(r.start for r in listed), 0], np.int64),
        np.arange(len(listed) + 2, dtype=np.uint64),
    )
    ranges = Ranges(table, 1, len(listed), count)
    start = data.draw(st.integers(0, count))
    length = data.draw(st.integers(0, count - start))
    assert list(intersect(ranges, start, length)) == list(intersect(list(ranges), start, length))
    assert ranges.byte_sizes(4).tolist() == [4 * r.length for r in listed]
    assert [tuple(place) for place in zip(*ranges.places(), strict=True)] == [(r.file, r.offset) for r in listed]


def test_of_many_ranges_only_those_that_are_read_become_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    starts = np.arange(100_000, dtype=np.int64) * 3
    table = RangeTable(np.zeros(100_000, np.int32), starts, starts, np.zeros(100_000, np.uint64))
    made: list[Any] = []
    real = Ranges.__getitem__
    monkeypatch.setattr(Ranges, "__getitem__", lambda self, index: made.append(index) or real(self, index))
    pieces = intersect(Ranges(table, 0, 100_000, 300_000), 150_001, 6)
    assert [piece.stored.start for piece in pieces] == [150_000, 150_003, 150_006]
    assert len(made) == 3
