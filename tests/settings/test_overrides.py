"""`section.key=value`, `--engine`, `--ds` and `--fast-dev-run`."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen_edit_zero.settings.load import load_settings
from tests.settings.loading import load, message


def test_overrides_win_over_the_recipe_and_say_so(tmp_path: Path) -> None:
    loaded = load(tmp_path, "run: {max_steps: 10, seed: 1}\n", overrides=["run.seed=2", "optimizer.lr=1e-5"])
    assert (loaded.settings.run.seed, loaded.settings.optimizer.lr) == (2, 1e-5)
    assert loaded.sources["run.seed"] == "override"


def test_an_override_can_open_a_section_that_is_null(tmp_path: Path) -> None:
    lora = load(tmp_path, overrides=["model.lora.rank=8"]).settings.model.lora
    assert lora is not None
    assert (lora.rank, lora.alpha) == (8, None)


def test_an_override_can_close_a_section(tmp_path: Path) -> None:
    recipe = "run: {max_steps: 10}\nmodel: {lora: {rank: 8}}\n"
    assert load(tmp_path, recipe, overrides=["model.lora=null"]).settings.model.lora is None


def test_the_last_of_two_equal_overrides_wins(tmp_path: Path) -> None:
    assert load(tmp_path, overrides=["run.seed=1", "run.seed=2"]).settings.run.seed == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("/data/a #1: b.jsonl", "/data/a #1: b.jsonl"),
        ("*.jsonl", "*.jsonl"),
        ("@x=y", "@x=y"),
        ('"8"', "8"),
        ("数据.jsonl", "数据.jsonl"),
    ],
)
def test_a_value_without_brackets_or_quotes_is_one_scalar_whatever_is_in_it(
    tmp_path: Path, text: str, value: str
) -> None:
    assert load(tmp_path, overrides=[f"data.manifest={text}", "sampling.count=0"]).settings.data.manifest == value


def test_lists_and_sections_can_be_given(tmp_path: Path) -> None:
    settings = load(tmp_path, overrides=['model.freeze=["*.img_mod.*", proj_out]', "batch={global_size: 4}"]).settings
    assert settings.model.freeze == ("*.img_mod.*", "proj_out")
    assert (settings.batch.global_size, settings.batch.micro_size) == (4, 1)


def test_wrong_overrides_are_named(tmp_path: Path) -> None:
    assert "gives no value" in message(tmp_path, overrides=["run.name="])
    assert "override: batch.globl_size is not a setting" in message(tmp_path, overrides=["batch.globl_size=3"])
    assert "must be a section" in message(tmp_path, overrides=["batch=3"])
    assert "override model.freeze=[a:1" in message(tmp_path, overrides=["model.freeze=[a"])


def test_engine_options_choose_the_engine(tmp_path: Path) -> None:
    loaded = load(tmp_path, engine="ddp")
    assert (loaded.settings.engine.backend, loaded.sources["engine.backend"]) == ("ddp", "--engine")
    assert loaded.settings.engine.deepspeed is None
    loaded = load_settings(None, ds=Path("ds_configs/zero3.json"))
    assert (loaded.settings.engine.backend, loaded.sources["engine.backend"]) == ("deepspeed", "--ds")
    assert loaded.settings.engine.deepspeed is not None
    assert loaded.settings.engine.deepspeed["zero_optimization"]["stage"] == 3


def test_ds_selects_deepspeed_over_the_recipe(tmp_path: Path) -> None:
    recipe = "run: {max_steps: 10}\nengine: {backend: fsdp2}\n"
    assert load(tmp_path, recipe, ds=Path("ds_configs/zero2.json").read_text()).settings.engine.backend == "deepspeed"


@pytest.mark.parametrize(
    "options",
    [
        {"engine": "fsdp2", "ds": Path("ds_configs/zero2.json")},
        {"engine": "fsdp2", "overrides": ["engine.backend=ddp"]},
        {"ds": Path("ds_configs/zero2.json"), "overrides": ["engine.backend=ddp"]},
    ],
)
def test_two_different_engines_are_a_contradiction(options: dict[str, object]) -> None:
    with pytest.raises(Exception, match="name different engines"):
        load_settings(None, **options)  # type: ignore[arg-type]


def test_a_fast_dev_run_is_short_and_has_a_name_of_its_own(tmp_path: Path) -> None:
    recipe = (
        "run: {name: big, epochs: 5, max_steps: 10}\nschedule: {warmup_steps: 5}\ncheckpoint: {every: 3}\n"
        "sampling: {every: 2, count: 9}\n"
    )
    loaded = load(tmp_path, recipe, fast_dev_run=True)
    settings = loaded.settings
    assert (settings.run.name, settings.run.max_steps, settings.run.epochs) == ("big-fast-dev-run", 2, None)
    assert (settings.checkpoint.every, settings.sampling.every, settings.sampling.count) == (None, None, 1)
    assert loaded.sources["run.max_steps"] == "--fast-dev-run"


def test_overrides_win_over_a_fast_dev_run(tmp_path: Path) -> None:
    settings = load(tmp_path, fast_dev_run=True, overrides=["run.max_steps=5", "run.name=x"]).settings
    assert (settings.run.max_steps, settings.data.max_samples) == (5, 16)
    assert settings.run.name == "x-fast-dev-run"  # or it would move the real run of that name aside
