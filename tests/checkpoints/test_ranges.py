"""Intersecting ranges and judging coverage, for all cuts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from qwen_edit_zero.checkpoints.ranges import StoredRange, coverage_fault, intersect


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
