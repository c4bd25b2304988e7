"""What a checkpoint takes, against the model itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from qwen_edit_zero.doctor.file_systems import FileSystem
from qwen_edit_zero.doctor.findings import Level
from qwen_edit_zero.doctor.needs import Needs, needs_of
from qwen_edit_zero.doctor.places import Place, Seen, judge_space, places_of
from qwen_edit_zero.edit_model.folder import open_model_folder
from qwen_edit_zero.edit_model.freezing import freeze
from qwen_edit_zero.edit_model.transformer import build_transformer
from qwen_edit_zero.settings.load import load_settings

DISK = FileSystem("nfs4", "server:/x", "/runs")


@pytest.mark.parametrize(
    ("overrides", "bytes_each"),
    [
        ((), 12),
        (("optimizer.ema=0.999",), 16),
        (("model.freeze=[transformer_blocks.0.*]",), 12),
        (("model.lora.rank=4",), 12),
        (("optimizer.kind=adamw_8bit", "engine.backend=ddp"), 6),
    ],
)
def test_it_is_of_the_parameters_that_train(overrides: tuple[str, ...], bytes_each: int) -> None:
    settings, folder = load_settings(None, overrides=overrides).settings, open_model_folder("tiny")
    with torch.device("meta"):
        module = build_transformer(folder, lora=settings.model.lora)
    report = freeze(module, settings.model.freeze)
    needs = needs_of(settings, folder)
    assert needs is not None
    assert needs.trained == report.trained
    assert needs.checkpoint_bytes == bytes_each * report.trained


@pytest.mark.parametrize(
    ("free", "level"), [(5 * 10**9, Level.FAILURE), (15 * 10**9, Level.WARNING), (10**12, Level.OK)]
)
def test_room_for_one_checkpoint_is_a_must_and_for_all_kept_a_wish(tmp_path: Path, free: int, level: Level) -> None:
    place = Place("run.dir", tmp_path, 4)
    found = judge_space(place, {"node1": Seen(DISK, free), "node2": Seen(DISK, free)}, Needs(1, 1, 10**10))
    assert found.level is level


def test_a_backup_needs_room_on_rank_0s_node_alone() -> None:
    place = Place("checkpoint.backup", Path("/backup"), 4, by_all=False)
    seen = {"node1": Seen(DISK, 10**12), "node2": Seen(DISK, 5)}
    assert judge_space(place, seen, Needs(1, 1, 10**10)).level is Level.OK


def test_places_are_those_outside_of_the_run_folder(tmp_path: Path) -> None:
    overrides = (f"run.dir={tmp_path}", "run.name=a", "checkpoint.backup=/backup", "checkpoint.keep=2")
    inside = places_of(load_settings(None, overrides=overrides).settings)
    assert [(p.setting, str(p.path), p.checkpoints) for p in inside] == [
        ("run.dir", f"{tmp_path}/a", 3),
        ("checkpoint.backup", "/backup/a", 3),
    ]
    assert [p.by_all for p in inside] == [True, False]  # rank 0 alone makes the copies
    stored = ("checkpoint.backup=s3://bucket/x", "data.cache_dir=/cache")
    assert [p.setting for p in places_of(load_settings(None, overrides=stored).settings)] == [
        "run.dir",
        "data.cache_dir",
    ]
