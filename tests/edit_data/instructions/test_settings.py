"""Settings of instructions that contradict each other or cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.settings.loading import MINIMAL, load, message


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ("safety_rules: own.yaml", 'data.safety_rules own.yaml (r.yaml:4) has no effect: data.safety "off" (default)'),
        ("safety_classifier: a:b", 'data.safety_classifier "a:b" (r.yaml:4) has no effect: data.safety "off"'),
        (
            "paraphrase_templates: true",
            "has no effect: data.paraphrases false (default) uses each row's instruction only",
        ),
        ("safety: blok", 'data.safety is "blok"; it must be off, flag or block'),
        ("caption_dropout: 1.5", "data.caption_dropout is 1.5; it must be at most 1"),
        ("normalise: 3", "data.normalise is 3; it must be true or false"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, data: str, expected: str) -> None:
    assert expected in message(tmp_path, f"{MINIMAL}data:\n  {data}\n")


def test_a_classifier_without_a_function_is_told(tmp_path: Path) -> None:
    told = message(tmp_path, f"{MINIMAL}data:\n  safety: flag\n  safety_classifier: module\n")
    assert 'data.safety_classifier "module" (r.yaml:5) is not of the form module:function' in told


@pytest.mark.parametrize(("value", "expected"), [("true", True), ("false", False), ("rules.yaml", Path("rules.yaml"))])
def test_normalise_is_a_switch_or_a_file(tmp_path: Path, value: str, expected: object) -> None:
    assert load(tmp_path, f"{MINIMAL}data:\n  normalise: {value}\n").settings.data.normalise == expected
