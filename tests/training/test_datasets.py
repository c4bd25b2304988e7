"""The tables that a run's settings name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from qwen_edit_zero.settings.models import DataSettings, RunSettings, SamplingSettings, Settings
from qwen_edit_zero.training.datasets import held_out_table, spread_over_categories, training_table
from tests.edit_data.builders import row, write_manifest


def settings(**data: Any) -> Settings:
    return Settings(run=RunSettings(max_steps=1), data=DataSettings(**data), sampling=SamplingSettings(count=3))


def test_one_manifest_can_hold_both_sets_by_its_splits(tmp_path: Path) -> None:
    rows = [row(i, split="test" if i % 3 == 0 else "train") for i in range(9)]
    chosen = settings(manifest=str(write_manifest(tmp_path, rows)), split="train", validation_split="test")
    training = training_table(chosen, 3, index_folder=tmp_path / "index")
    held_out = held_out_table(chosen, 3, index_folder=tmp_path / "index")
    assert [s.id for s in training] == ["a1", "a2", "a4", "a5", "a7", "a8"]
    assert held_out is not None
    assert [s.id for s in held_out.table] == ["a0", "a3", "a6"]
    assert len([p for p in (tmp_path / "index").iterdir() if p.name != "unfinished"]) == 1, "read once"


def test_without_validation_there_is_none(tmp_path: Path) -> None:
    chosen = settings(manifest=str(write_manifest(tmp_path, [row(0)])))
    assert held_out_table(chosen, 3, index_folder=tmp_path / "index") is None


def test_trials_take_the_first_rows(tmp_path: Path) -> None:
    chosen = settings(manifest=str(write_manifest(tmp_path, [row(i) for i in range(9)])), max_samples=2)
    assert [s.id for s in training_table(chosen, 3, index_folder=tmp_path / "index")] == ["a0", "a1"]


def test_settings_of_the_format_reach_the_reader(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    path = tmp_path / "set" / "table.csv"
    path.write_text("before,after,say\n../pictures/a.png,b.png,make it so\n")
    chosen = settings(
        manifest=str(path),
        columns={"source": "before", "target": "after", "instruction": "say"},
        outside=[str(tmp_path / "pictures")],
    )
    table = training_table(chosen, 3, index_folder=tmp_path / "index")
    assert table[0].source_names == (str(tmp_path / "pictures" / "a.png"),)


def test_the_demo_has_its_own_held_out_samples(tmp_path: Path) -> None:
    held_out = held_out_table(settings(), 3, index_folder=tmp_path)
    assert held_out is not None
    assert len({s.category for s in held_out.table}) == 3, "the first of each category come first"


def test_held_out_samples_are_spread_over_categories() -> None:
    assert spread_over_categories(np.array([0, 0, 1, 0, 2, 1], np.int32), 5).tolist() == [0, 2, 4, 1, 5]
