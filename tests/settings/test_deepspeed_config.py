"""DeepSpeed JSONs: strict reading, "auto", and agreement with the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.deepspeed_keys import BF16_KEYS, FP16_KEYS, ZERO_KEYS
from qwen_edit_zero.settings.files import shipped
from qwen_edit_zero.settings.load import load_settings
from qwen_edit_zero.settings.render import settings_yaml
from tests.settings.loading import MINIMAL, load, message

AUTO: dict[str, Any] = {"train_batch_size": "auto", "zero_optimization": {"stage": 2}}
STATED = MINIMAL + "batch:\n  global_size: 8\n  micro_size: 2\nprecision: bf16\noptimizer:\n  clip_norm: 1.0\n"


def resolved(tmp_path: Path, ds: dict[str, Any], recipe: str = MINIMAL, **options: Any) -> dict[str, Any]:
    config = load(tmp_path, recipe, ds, **options).settings.engine.deepspeed
    assert config is not None
    return config


@pytest.mark.parametrize("path", shipped("ds_configs"), ids=lambda path: path.name)
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_every_shipped_config_loads_with_every_precision(path: Path, precision: str) -> None:
    config = load_settings(None, ds=path, overrides=[f"precision={precision}"]).settings.engine.deepspeed
    assert config is not None
    assert config["bf16"]["enabled"] is (precision == "bf16")
    assert config["fp16"]["enabled"] is (precision == "fp16")


def test_deepspeed_without_a_json_is_zero_2() -> None:
    loaded = load_settings(None, engine="deepspeed")
    assert loaded.settings.engine.deepspeed is not None
    assert loaded.settings.engine.deepspeed["zero_optimization"]["stage"] == 2
    assert loaded.sources["engine.deepspeed.zero_optimization.stage"].startswith("ds_configs/zero2.json:")


def test_the_result_is_complete_and_holds_no_auto(tmp_path: Path) -> None:
    ds = {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto"}},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": "auto"},
    }  # fmt: skip
    config = resolved(tmp_path, ds, STATED)
    assert config == {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3, "reduce_bucket_size": 500_000_000, "use_multi_rank_bucket_allreduce": False,
        },
    }  # fmt: skip
    assert type(config["zero_optimization"]["reduce_bucket_size"]) is int


def test_no_clipping_is_written_as_zero_since_deepspeed_takes_a_missing_value_for_one(tmp_path: Path) -> None:
    assert resolved(tmp_path, AUTO, MINIMAL + "optimizer: {clip_norm: null}\n")["gradient_clipping"] == 0.0


def test_numbers_become_settings_where_nothing_else_decides(tmp_path: Path) -> None:
    ds = AUTO | {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": 0.5,
        "fp16": {"enabled": True, "initial_scale_power": 10, "loss_scale_window": 50},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.8, 0.9]}},
    }
    loaded = load(tmp_path, MINIMAL, ds)
    settings = loaded.settings
    assert (settings.batch.global_size, settings.batch.micro_size, settings.optimizer.clip_norm) == (16, 4, 0.5)
    assert (settings.precision.mode, settings.precision.initial_loss_scale) == ("fp16", 1024)
    assert (settings.optimizer.lr, settings.optimizer.betas) == (1e-4, (0.8, 0.9))
    assert loaded.sources["batch.global_size"] == f"{tmp_path}/d.json:2"
    assert loaded.sources["batch.micro_size"].startswith(f"{tmp_path}/d.json:")


def test_numbers_that_agree_with_the_recipe_are_fine(tmp_path: Path) -> None:
    ds = AUTO | {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 1}
    assert resolved(tmp_path, ds, STATED)["train_micro_batch_size_per_gpu"] == 2


@pytest.mark.parametrize(
    ("ds", "words"),
    [
        ({"train_batch_size": 16}, ["d.json:2: train_batch_size is 16, but batch.global_size is 8 (r.yaml:4)"]),
        ({"gradient_clipping": 0.3}, ["gradient_clipping is 0.3, but optimizer.clip_norm is 1.0 (r.yaml:8)"]),
        ({"gradient_clipping": 0}, ["gradient_clipping is 0, but optimizer.clip_norm is 1.0"]),
        ({"fp16": {"enabled": True}}, ['fp16.enabled is true, but precision.mode is "bf16" (r.yaml:6)']),
        ({"bf16": {"enabled": False}}, ['bf16.enabled is false, but precision.mode is "bf16"']),
    ],
)
def test_a_number_that_contradicts_the_recipe_is_an_error_naming_both_places(
    tmp_path: Path, ds: dict[str, Any], words: list[str]
) -> None:
    text = message(tmp_path, STATED, AUTO | ds)
    assert all(word in text for word in words), text


def test_a_number_that_contradicts_an_override_is_an_error_too(tmp_path: Path) -> None:
    text = message(tmp_path, MINIMAL, AUTO | {"train_batch_size": 16}, overrides=["batch.global_size=32"])
    assert "batch.global_size is 32 (override)" in text


def test_a_product_that_is_not_the_global_size_shows_all_four_numbers_and_who_said_them(tmp_path: Path) -> None:
    ds = AUTO | {"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4}
    text = message(tmp_path, MINIMAL, ds, world_size=1)
    assert "train_batch_size 9 (d.json:2)" in text
    assert "train_micro_batch_size_per_gpu 2 (d.json:6)" in text
    assert "gradient_accumulation_steps 4 (d.json:7)" in text
    assert "1 rank (launcher) = 8" in text


def test_accumulation_must_be_what_batch_and_ranks_make_it(tmp_path: Path) -> None:
    ds = AUTO | {"gradient_accumulation_steps": 2}
    load(tmp_path, STATED, ds, world_size=2)
    text = message(tmp_path, STATED, ds, world_size=4)
    assert "batch.global_size 8 (r.yaml:4) is not batch.micro_size 2 (r.yaml:5) x gradient_accumulation_steps 2" in text


def test_only_the_global_size_has_to_be_given(tmp_path: Path) -> None:
    ds = AUTO | {"train_batch_size": 8}
    assert load(tmp_path, MINIMAL, ds, world_size=4).settings.batch.global_size == 8
    assert "does not divide over 3 ranks" in message(tmp_path, MINIMAL, ds, world_size=3)


@pytest.mark.parametrize(
    ("ds", "words"),
    [
        ({"zero_optimization": {"stage": 2}}, "no batch size"),
        ({"train_batch_size": 8}, "zero_optimization.stage is not given"),
        (AUTO | {"train_micro_batch_size_per_gpu": 0}, "d.json:6: train_micro_batch_size_per_gpu is 0"),
        (AUTO | {"train_batch_size": "8"}, 'd.json:2: train_batch_size is "8"; it must be a whole number'),
        (AUTO | {"train_batch_size": 8.5}, "a whole number"),
        (AUTO | {"train_batch_size": True}, "a whole number"),
        (AUTO | {"zero_optimization": {"stage": 4}}, "d.json:4: zero_optimization.stage is 4; it must be 1, 2 or 3"),
        (AUTO | {"zero_optimization": {"stage": "2"}}, 'zero_optimization.stage is "2"; it must be a whole number'),
        (AUTO | {"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage"),
        (AUTO | {"zero_optimization": True}, "zero_optimization is true; it must be an object"),
        (AUTO | {"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16.enabled and fp16.enabled (d.json:10)"),
        (AUTO | {"gradient_clipp1ng": 0.3}, "gradient_clipp1ng is not a DeepSpeed key; did you mean gradient_clipp"),
        (AUTO | {"zero_optimization": {"stage": 2, "overlap_com": True}}, "did you mean overlap_comm?"),
        (AUTO | {"freeze": ["a"]}, "freeze is not a DeepSpeed key"),
        (AUTO | {"scheduler": {"type": "WarmupLR", "params": {}}}, "the `schedule` section of the recipe"),
        (AUTO | {"optimizer": {"type": "Lamb"}}, 'optimizer.type is "Lamb"; it must be "AdamW"'),
        (AUTO | {"elasticity": {}}, "no longer has it"),
        (AUTO | {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "kept in fp32"),
        (AUTO | {"communication_data_type": "fp16"}, '"fp32"'),
        (AUTO | {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "works with stage 3 only"),
        (AUTO | {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "nvme_path does not say"),
        (AUTO | {"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}}, "none"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_its_place(tmp_path: Path, ds: dict[str, Any], words: str) -> None:
    text = message(tmp_path, MINIMAL, ds)
    assert words in text
    assert "d.json" in text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["d.json is empty"]),
        ("[1]", ["d.json holds"]),
        ('{\n // stage\n "train_batch_size": 8}', ["d.json:2", "no comments"]),
        ('{"train_batch_size": 8 # eight\n}', ["d.json:1", "no comments"]),
        ('{"a": {"b": 1,\n "b": 2}}', ["d.json:2", "second time", "d.json:1"]),
        ('{"gradient_clipping": NaN}', ["d.json:1", "NaN"]),
        ('{"gradient_clipping": -Infinity}', ["Infinity"]),
        ('{"gradient_clipping": 1e999}', ["too large"]),
        ('{"a": 1,}', ["no comma after the last"]),
        ('{"a": [1,]}', ["no comma after the last"]),
        ('{"a": True}', ["write true"]),
        ("{'a': 1}", ["a key in double quotes was expected"]),
        ('{"a": 1', ["the file ends"]),
        ('{"a": "b', ["d.json:1"]),
        ('{"a" 1}', ["colon"]),
        ('{"a": 01}', ["d.json:1"]),
        ('{"a": 1} {"b": 2}', ["after the end"]),
        ('{"a":' + "[" * 5000, ["nested too deeply"]),
    ],
)
def test_what_is_not_strictly_json_is_refused_with_its_line(tmp_path: Path, text: str, words: list[str]) -> None:
    found = message(tmp_path, MINIMAL, text)
    assert all(word in found for word in words), found


def test_a_byte_order_mark_and_tabs_change_nothing(tmp_path: Path) -> None:
    text = (
        '\ufeff{\n\t"train_batch_size":8,\r\n"zero_optimization": {"stage": 2, "leaf_module": {"names": ["\\u56fe"]}}}'
    )
    config = load(tmp_path, MINIMAL, text).settings.engine.deepspeed
    assert config is not None
    assert config["zero_optimization"]["leaf_module"] == {"names": ["图"]}


def test_a_file_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "d.json"
    path.write_bytes(b'{"a": "caf\xe9"}')
    with pytest.raises(SettingsError, match="not UTF-8"):
        load_settings(None, ds=path)
    with pytest.raises(SettingsError, match=r"did you mean ds_configs/zero2\.json"):
        load_settings(None, ds=Path("ds_configs/zero2.jsn"))


def test_resolved_settings_can_be_loaded_as_a_recipe_again(tmp_path: Path) -> None:
    first = load(tmp_path, STATED, AUTO | {"zero_optimization": {"stage": 3, "overlap_comm": True}})
    second = load(tmp_path, settings_yaml(first))
    assert second.settings == first.settings
    fp16 = load(tmp_path, STATED.replace("bf16", "fp16"), AUTO)
    assert load(tmp_path, settings_yaml(fp16, show_sources=False)).settings == fp16.settings


def test_a_config_in_the_recipe_and_another_by_ds_are_a_contradiction(tmp_path: Path) -> None:
    recipe = (
        MINIMAL
        + "engine:\n  backend: deepspeed\n  deepspeed: {train_batch_size: auto, zero_optimization: {stage: 1}}\n"
    )
    assert load(tmp_path, recipe).settings.engine.deepspeed
    assert "engine.deepspeed (r.yaml:5) and --ds" in message(tmp_path, recipe, AUTO)


def test_the_table_of_keys_is_that_of_the_installed_deepspeed() -> None:
    from deepspeed.runtime.config import _REMOVED_ZERO_CONFIG_KEYS
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    fields = {field.alias or name for name, field in DeepSpeedZeroConfig.model_fields.items()}
    assert set(ZERO_KEYS) == fields | set(_REMOVED_ZERO_CONFIG_KEYS)
    assert set(BF16_KEYS) == set(DeepSpeedBF16Config.model_fields)
    assert set(FP16_KEYS) == set(DeepSpeedFP16Config.model_fields)
