"""Rows: the quick way and the exact way agree, and names stay under the root unless allowed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_edit_zero.edit_data.manifests.names import NameRules, RowError
from qwen_edit_zero.edit_data.manifests.rows import Row, check_row, parse_object, parse_row

RULES = NameRules("/data/set", ("/data/other", "s3://bucket/pictures"))
ROW = {"source": "s.png", "target": "t.png", "instruction": "x"}


def exact(raw: bytes) -> Row | str:
    try:
        return check_row(parse_object(raw), RULES, max_references=3)
    except RowError as error:
        return str(error)


def parsed(raw: bytes) -> Row | str:
    try:
        return parse_row(raw, RULES, max_references=3)
    except RowError as error:
        return str(error)


texts = st.one_of(
    st.sampled_from(
        ["", " ", "a/b.png", "../x", "/etc/x", "a//b", "~/x", "x:y", 'q"q', "b\\c", "\\", '\\"', "a.tar//b", "é"]
    ),
    st.text(max_size=6),
)
values = st.one_of(texts, st.none(), st.booleans(), st.integers(), st.floats(), st.lists(texts, max_size=4))
keys = st.sampled_from(
    ["id", "source", "instruction", "target", "category", "weight", "split", "mask", "paraphrases", "x"]
)


@given(pairs=st.lists(st.tuples(keys, values), max_size=8), is_ascii=st.booleans())
def test_the_quick_way_accepts_nothing_that_the_exact_way_refuses_or_reads_otherwise(
    pairs: list[tuple[str, Any]], is_ascii: bool
) -> None:
    """Also with keys that stand twice, which JSON's text can hold and a parsed object cannot."""
    pairs = [("source", "s.png"), ("target", "t.png"), ("instruction", "x"), *pairs]
    text = ", ".join(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=is_ascii)}" for key, value in pairs)
    raw = f"{{{text}}}".encode("utf-8", "surrogatepass")
    assert parsed(raw) == exact(raw)


@given(values=st.fixed_dictionaries({"source": values, "target": texts, "instruction": texts}, optional={"id": values}))
def test_both_ways_agree_on_any_values(values: dict[str, Any]) -> None:
    raw = json.dumps(values).encode()
    assert parsed(raw) == exact(raw)


def test_all_keys_are_read() -> None:
    row = {**ROW, "id": 7, "category": "c", "weight": 2, "split": "test", "mask": "m.png", "paraphrases": ["y", "z"]}
    assert parsed(json.dumps(row).encode()) == Row("7", ("s.png",), "x", "t.png", "c", 2.0, "test", "m.png", ("y", "z"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"split": 3}, '"split" is a number'),
        ({"split": " "}, '"split" is empty'),
        ({"mask": "../m.png"}, "leads out"),
        ({"mask": ["m.png"]}, '"mask" is a list'),
        ({"paraphrases": "y"}, "not a list of texts"),
        ({"paraphrases": ["y", ""]}, '"paraphrases" is empty'),
        ({"weight": 1e-60}, "between"),
        ({"weight": 1e60}, "between"),
    ],
)
def test_new_keys_are_checked_as_strictly(changes: dict[str, Any], reason: str) -> None:
    assert reason in str(parsed(json.dumps({**ROW, **changes}).encode()))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a/../b.png", "b.png"),
        ("../../data/other/b.png", "/data/other/b.png"),
        ("/data/other/c/../b.png", "/data/other/b.png"),
        ("s3://bucket/pictures/b.png", "s3://bucket/pictures/b.png"),
        ("x/./s.tar//a//b.png", "x/s.tar//a//b.png"),
        ("p.parquet//17/image", "p.parquet//17/image"),
        ("/data/other/s.tar//b.png", "/data/other/s.tar//b.png"),
    ],
)
def test_names_are_normalised_and_may_lead_to_what_is_allowed(name: str, expected: str) -> None:
    assert RULES.check(name, "source") == expected


@pytest.mark.parametrize(
    "name",
    [
        "/data/otherwise/b.png", "/data/other/../b.png", "/data/other", "../other2/b.png", "s3://bucket/b.png",
        "s3://bucket/pictures/../b.png", "s3://bucket/pictures2/b.png", "../s.tar//b.png", "/etc/s.tar//b.png",
        "file:///data/other/b.png",
    ],
)  # fmt: skip
def test_names_may_not_lead_elsewhere_and_the_setting_is_named(name: str) -> None:
    with pytest.raises(RowError, match=r"data\.outside"):
        RULES.check(name, "source")
