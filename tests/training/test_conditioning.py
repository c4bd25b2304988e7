"""What a run gets of its data by its settings: samples, texts and variants of each draw, and what is left out."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qwen_edit_zero.edit_data.cache.store import CachedSample
from qwen_edit_zero.edit_data.instructions.classifier import Verdict
from qwen_edit_zero.edit_model.folder import ModelFolder, open_model_folder
from qwen_edit_zero.errors import DataError
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.training import conditioning
from qwen_edit_zero.training.conditioning import Conditioned, condition
from tests.edit_data.builders import row, save_pictures, write_manifest
from tests.edit_data.cache.filling import Encoders

ASKED: list[tuple[str, tuple[str, ...]]] = []
HERE = __name__


def judge(instruction: str, pictures: Sequence[Any]) -> Any:
    """A user's classifier."""
    ASKED.append((instruction, tuple(Path(picture.name).name for picture in pictures)))
    if instruction == "odd":
        return Verdict("hm", "flag")
    return "bad target" if pictures[-1].name.endswith("t1.png") else None


class Stand(Encoders):
    """In the place of the frozen models."""

    def __init__(self, folder: ModelFolder, **options: Any) -> None:
        super().__init__()

    def close(self) -> None:
        pass


@pytest.fixture
def conditioned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Conditions a run with these rows and settings."""
    monkeypatch.setattr(conditioning, "ConditioningEncoder", Stand)
    opened: list[Conditioned] = []

    def make(rows: list[dict[str, Any]], *, data: dict[str, Any], **sections: dict[str, Any]) -> Conditioned:
        settings = Settings.model_validate(
            {
                "run": {"max_steps": 1, "seed": 7},
                "data": {"manifest": str(write_manifest(tmp_path, rows)), "vae_area": 4096, "condition_area": 1024}
                | data,
            }
            | sections
        )
        opened.append(
            condition(
                settings,
                open_model_folder("tiny"),
                cache_folder=tmp_path / "cache",
                work=tmp_path / "work",
                left_out=tmp_path / "left_out.jsonl",
                device=torch.device("cpu"),
                rank=0,
                world_size=1,
            )
        )
        return opened[-1]

    yield make
    for one in opened:
        one.cache.close()


def test_each_draw_reads_the_text_and_the_variant_that_chance_gives_it(conditioned: Any, tmp_path: Path) -> None:
    rows = [{**row(i), "instruction": f"t{i}", "paraphrases": [f"other {i}"] * (i % 2)} for i in range(6)]
    save_pictures(tmp_path, rows)
    data = {"caption_dropout": 0.25, "paraphrases": True, "variants": 2, "augment": {"crop": 0.7}}
    training = (got := conditioned(rows, data=data, sampling={"count": 0})).training
    keys = {(i, e): training.key_of(i, e, 0) for i in range(6) for e in range(400)}
    assert all(keys[i, e] == training.key_of(i, e, 0) for i, e in keys)
    entries: dict[Any, CachedSample] = {key: got.cache.get(key) for key in set(keys.values())}
    lengths = Counter((i, len(entries[key].prompt_embeds) - 1) for (i, _), key in keys.items())
    for i in range(6):
        texts = {2: 0.75} if i % 2 == 0 else {2: 0.375, 7: 0.375}
        for length, share in {**texts, 0: 0.25}.items():
            assert lengths[i, length] / 400 == pytest.approx(share, abs=0.08)
        assert len({keys[i, e].target for e in range(400)}) == 2
    assert keys[0, 0] != training.key_of(0, 0, 1) or keys[1, 0] != training.key_of(1, 0, 1)


def test_rows_left_out_are_all_in_the_runs_file(
    conditioned: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(i) for i in range(30)]
    save_pictures(tmp_path, rows)
    for i in range(12):
        (tmp_path / f"t{i}.png").unlink()
    content = (tmp_path / "t20.png").read_bytes()
    (tmp_path / "t20.png").write_bytes(content[: len(content) // 2])
    rows[25]["instruction"] = "make her nude"
    rows[29]["weight"] = -1
    got = conditioned(rows, data={"on_error": "skip", "safety": "block"}, sampling={"count": 0})
    lines = [json.loads(line) for line in (tmp_path / "left_out.jsonl").read_text().splitlines()]
    left_out = {*range(12), 20, 25, 29}
    assert {line["line"] - 1 for line in lines} == left_out
    assert all(line["set"] == "training set" and line["reason"] for line in lines)
    assert [s.id for s in got.training.samples] == [f"a{i}" for i in range(30) if i not in left_out]
    out = capsys.readouterr().out
    assert out.count("left out of the training set: ") == 11
    assert "5 more rows; all are in" in out
    assert np.array_equal(got.training.samples.lines, got.training.prepared.rows + 1)
    conditioned([row(15)], data={}, sampling={"count": 0})
    assert not (tmp_path / "left_out.jsonl").exists(), "it is always about the last start"


def test_a_classifier_is_asked_about_each_row_with_its_target_and_once_for_ever(
    conditioned: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{**row(i), "source": ["s0_0.png"], "instruction": "same"} for i in range(3)] + [row(3, instruction="odd")]
    save_pictures(tmp_path, rows)
    data = {"on_error": "skip", "safety": "block", "safety_classifier": f"{HERE}:judge"}
    ASKED.clear()
    for start in range(2):
        got = conditioned(rows, data=data, sampling={"count": 0})
        assert [s.id for s in got.training.samples] == ["a0", "a2", "a3"]
        told = capsys.readouterr().out
        assert f'rule {HERE}:judge (classifier) at "bad target" of data.safety' in told
        assert f"        1  classifier: {HERE}:judge (only flagged)" in told
        assert "1 of 4 instructions refused" in told
        assert len(ASKED) == 4, f"start {start}"
    assert [*(("same", ("s0_0.png", f"t{i}.png")) for i in range(3)), ("odd", ("s3_0.png", "t3.png"))] == ASKED
    rows[2]["instruction"] = "other"
    conditioned(rows, data=data, sampling={"count": 0})
    assert len(ASKED) == 5, "of what has changed alone"
    monkeypatch.setattr(judge, "version", 2, raising=False)
    got = conditioned(rows, data=data, sampling={"count": 0})
    assert len(ASKED) == 9, "a new version says everything anew"
    assert got.training.prepared.made == 0, "and what it accepts is not encoded again"
    got = conditioned(rows, data={**data, "safety": "flag"}, sampling={"count": 0})
    assert len(got.training.samples) == 4, "flagged rows are trained on"
    assert len(ASKED) == 9


def test_held_out_samples_come_from_every_category_with_their_negative_prompt(conditioned: Any, tmp_path: Path) -> None:
    rows = [{**row(i), "category": "abb"[i % 3]} for i in range(9)]
    save_pictures(tmp_path, rows)
    validation = tmp_path / "validation.jsonl"
    validation.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")
    sampling = {"count": 3, "guidance": 2.0, "negative_prompt": "ugly picture"}
    got = conditioned(rows, data={"validation": str(validation)}, sampling=sampling)
    held_out = got.held_out
    assert [s.category for s in held_out.samples] == ["a", "b", "b"]
    for sample, key, negative in zip(held_out.samples, held_out.keys, held_out.negative_keys, strict=True):
        assert len(got.cache.get(key).prompt_embeds) == 1 + len(sample.instruction)
        assert len(got.cache.get(negative).prompt_embeds) == 1 + len("ugly picture")
        assert key.target == negative.target
    without = conditioned(rows, data={"validation": str(validation)}, sampling={"count": 3, "guidance": 1.0})
    assert without.held_out.negative_keys == ()


def test_tokens_of_buckets_are_those_of_their_latents(conditioned: Any, tmp_path: Path) -> None:
    rows = [row(i, references=1 + i % 3) for i in range(5)]
    save_pictures(tmp_path, rows)
    training = (got := conditioned(rows, data={}, sampling={"count": 0})).training
    for i in range(5):
        entry = got.cache.get(training.key_of(i, 0, 0))
        latents = (entry.target_latent, *entry.reference_latents)
        assert training.image_tokens()[training.prepared.bucket_codes[i]] == sum(t[0].numel() // 4 for t in latents)


def test_held_out_samples_that_are_trained_on_are_named(
    conditioned: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(i) for i in range(6)]
    other = [{**rows[i], "id": f"new {i}"} for i in range(3)] + [{**row(9), "id": "a5"}, row(7)]
    save_pictures(tmp_path, rows + other)
    validation = tmp_path / "validation.jsonl"
    validation.write_text("".join(json.dumps(r) + "\n" for r in other), encoding="utf-8")
    got = conditioned(rows, data={"validation": str(validation)}, sampling={"count": 0}, validation={"every": 1})
    assert sorted(got.validation.ids) == ["a5", "a7", "new 0", "new 1", "new 2"]
    out = capsys.readouterr().out
    assert 'warning: 3 of 5 held-out samples show the same pictures as samples that are trained on: "new 0", ' in out
    assert 'warning: 1 of 5 held-out samples have the ids of training samples with other pictures: "a5". If' in out


def test_without_any_usable_held_out_sample_there_is_no_loss(conditioned: Any, tmp_path: Path) -> None:
    save_pictures(tmp_path, [row(0)])
    validation = tmp_path / "validation.jsonl"
    validation.write_text(json.dumps(row(1)) + "\n", encoding="utf-8")
    with pytest.raises(DataError, match="the loss on held-out samples, but none can be used"):
        conditioned(
            [row(0)],
            data={"validation": str(validation), "on_error": "skip"},
            sampling={"count": 0},
            validation={"every": 1},
        )
