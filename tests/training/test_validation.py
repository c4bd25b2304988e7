"""What the loss on held-out samples looks at: which samples, which noise, and what was trained on as well."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from qwen_edit_zero.settings.models import DataSettings, RunSettings, SamplingSettings, Settings, ValidationSettings
from qwen_edit_zero.training.datasets import held_out_table
from qwen_edit_zero.training.leakage import same_pictures
from qwen_edit_zero.training.validation import fixed_draw, fixed_sigma, micro_batches
from tests.edit_data.builders import row, write_manifest

SHAPE = (16, 4, 6)


def test_noise_and_level_are_of_the_seed_the_sample_and_the_part_alone() -> None:
    settings = ValidationSettings(every=1, sigmas=4)
    items = [("a", 0), ("a", 1), ("b", 0)]
    draw = fixed_draw(settings, items, SHAPE)
    for i, item in enumerate(items):
        alone = fixed_draw(settings, [item], SHAPE)
        assert torch.equal(alone.noise[0], draw.noise[i])
        assert alone.sigma[0] == draw.sigma[i]
    assert len({float(n.sum()) for n in draw.noise}) == 3, "noise of its own for each part and sample"
    other = fixed_draw(settings.model_copy(update={"seed": 1}), items, SHAPE)
    assert not torch.equal(other.noise, draw.noise)
    assert draw.weight.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("parts", [1, 3, 4])
def test_levels_are_spread_evenly(parts: int) -> None:
    settings = ValidationSettings(every=1, sigmas=parts)
    levels = np.array([[fixed_sigma(settings, f"s{i}", k)[0] for k in range(parts)] for i in range(400)])
    assert (np.floor(levels * parts) == np.arange(parts)).all(), "one in each part"
    assert np.allclose(levels.mean(0), (np.arange(parts) + 0.5) / parts, atol=0.06 / parts)
    assert 0 < levels.min() < levels.max() < 1


def test_micro_batches_are_of_one_bucket_and_hold_every_level_of_every_sample_once() -> None:
    buckets = [0, 0, 0, 5, 7, 7]
    for size in (1, 2, 3, 8):
        batches = micro_batches(buckets, 4, size)
        assert all(len({buckets[item.sample] for item in batch}) == 1 and len(batch) <= size for batch in batches)
        found = [(item.sample, item.part) for batch in batches for item in batch]
        assert found == [(sample, part) for sample in range(6) for part in range(4)]


def chosen(folder: Path, rows: list[dict[str, Any]], samples: int, *, seed: int = 0, count: int = 0) -> Any:
    folder.mkdir()
    settings = Settings(
        run=RunSettings(max_steps=1),
        data=DataSettings(manifest="demo", validation=str(write_manifest(folder, rows))),
        sampling=SamplingSettings(count=count),
        validation=ValidationSettings(every=1, samples=samples, seed=seed),
    )
    found = held_out_table(settings, 3, index_folder=folder / "index")
    assert found is not None
    return found


def test_the_choice_is_by_id_and_seed_and_not_by_order(tmp_path: Path) -> None:
    rows = [row(i) for i in range(40)]

    def ids(name: str, rows: list[dict[str, Any]], seed: int = 0) -> list[str]:
        return [s.id for s in chosen(tmp_path / name, rows, 8, seed=seed).table]

    first = ids("a", rows)
    assert len(first) == 8
    assert first != [f"a{i}" for i in range(8)]
    assert sorted(ids("b", rows[::-1])) == sorted(first)
    assert len(set(ids("c", [*rows, row(40)])) & set(first)) >= 7, "a new row takes one place at most"
    assert set(ids("d", rows, seed=1)) != set(first)
    whole = chosen(tmp_path / "e", rows[:5], 8)
    assert [s.id for s in whole.table] == [f"a{i}" for i in range(5)]
    assert whole.available == 5


def test_pictures_are_of_the_samples_they_were_of_without_the_loss(tmp_path: Path) -> None:
    rows = [{**row(i), "category": "xy"[i % 2]} for i in range(10)]
    found = chosen(tmp_path / "a", rows, 4, count=3)
    assert found.pictured == 3
    assert [s.id for s in found.table[:3]] == ["a0", "a1", "a2"]
    assert found.pictured_ids() == {"a0", "a1", "a2"}
    assert int(found.validated.sum()) == 4
    assert 4 <= len(found.table) <= 7
    assert len({s.id for s in found.table}) == len(found.table), "a sample for both is there once"


def test_the_same_pictures_are_found_among_the_trained_ones() -> None:
    rng = np.random.default_rng(0)
    trained = rng.integers(0, 256, (1000, 2, 3, 16)).astype(np.uint8)
    held_out = rng.integers(0, 256, (5, 1, 3, 16)).astype(np.uint8)
    held_out[1, 0] = held_out[4, 0] = trained[700, 0]
    held_out[2, 0] = trained[10, 1]  # an augmented version
    held_out[3, 0, 0] = trained[20, 0, 0]  # the same target of other references
    sets = [_Set(trained), _Set(held_out)]
    assert same_pictures(sets[0], sets[1]) == [1, 4]  # type: ignore[arg-type]


class _Set(SimpleNamespace):
    def __init__(self, latents: Any) -> None:
        super().__init__(latents=latents)

    def __len__(self) -> int:
        return len(self.latents)


def test_records_of_a_run_are_strict_json(tmp_path: Path) -> None:
    from qwen_edit_zero.training.metrics import MetricsWriter
    from qwen_edit_zero.training.validation import HeldOutLoss, to_record

    found = HeldOutLoss(float("nan"), {"0-0.25": float("inf")}, {}, 2, 1.0, ("a",))
    writer = MetricsWriter(tmp_path, first_step=0, tensorboard=True)
    writer.write_held_out(to_record(found, step=0, set_name="x"))
    writer.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
    assert (line["step"], line["held_out_loss"], line["held_out_by_sigma"]) == (0, None, {"0-0.25": None})
    again = MetricsWriter(tmp_path, first_step=0, tensorboard=False)
    assert again.held_out == [], "a run that starts over has no value of step 0 yet"
    again.close()
