"""What is said of samples and data before anything is planned: where it is from, and how much is too much."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.planning.jobs.model import TransformerShape
from qwen_edit_zero.planning.jobs.wish import Shape, Wish

ROW = json.dumps({"source": "a.png", "target": "b.png", "instruction": "make it blue"})


def wish(*overrides: str, **said: Any) -> Wish:
    return Wish(None, ("model.path=Qwen-Image-Edit-2509", *overrides), None, None, None, Shape(**said))


def test_what_the_manifest_says_of_samples_is_told(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(f"{ROW}\n")
    assert wish(f"data.manifest={path}").sample_is_from.startswith(f"from 1 row of {path}: ")
    path.write_text(f"{ROW}\n{ROW}\n")
    assert wish(f"data.manifest={path}").sample_is_from.startswith(f"from 2 rows of {path}: ")


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("data.jsonl", None, "data.jsonl is not here"),
        ("data.jsonl", "", "data.jsonl is empty"),
        ("data.jsonl", "garbage\n\x00\n[]\n", "no row of DIR/data.jsonl has a source, an instruction and"),
        ("data.csv", "source,target\n", "data.csv is no .jsonl"),
    ],
)
def test_a_manifest_that_was_not_read_is_told(tmp_path: Path, name: str, content: str | None, says: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    found = wish(f"data.manifest={path}")
    assert found.facts is None
    assert found.sample_is_from.startswith("assumed: ")
    assert says in found.sample_is_from.replace(str(tmp_path), "DIR")
    assert not wish(f"data.manifest={path}", references=1, text_tokens=200).sample_is_from


@pytest.mark.parametrize(
    ("overrides", "said", "says"),
    [
        ((), {"references": 1_000_000}, "--references is 1,000,000; the planner is meant for up to 16"),
        ((), {"text_tokens": 10**9}, "--text-tokens is 1,000,000,000; the planner is meant for up to 100,000"),
        (("data.manifest=not_here.jsonl", "data.max_references=99"), {}, "data.max_references is 99"),
    ],
)
def test_samples_beyond_measure_are_refused(overrides: tuple[str, ...], said: dict[str, int], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        _ = wish(*overrides, **said).sample


def test_a_prompt_beyond_measure_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps(json.loads(ROW) | {"instruction": "word " * 100_000}))
    with pytest.raises(SettingsError, match=r"the longest prompt of .*data\.jsonl has about 130,\d+ tokens"):
        _ = wish(f"data.manifest={path}").sample


@pytest.mark.parametrize("key", ["num_layers", "num_attention_heads", "joint_attention_dim"])
def test_models_beyond_measure_are_refused(key: str) -> None:
    with pytest.raises(SettingsError, match=f"{key} = 100000000; it must be from 1 to"):
        TransformerShape.from_config({key: 100_000_000})
