"""Reading recipes: values, places, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.files import shipped
from qwen_edit_zero.settings.load import load_settings
from tests.settings.loading import MINIMAL, load, message


def test_values_come_from_the_recipe_and_the_rest_from_defaults(tmp_path: Path) -> None:
    loaded = load(tmp_path, "run: {max_steps: 10}\noptimizer:\n  lr: 1e-5\n")
    assert loaded.settings.optimizer.lr == 1e-5
    assert loaded.settings.optimizer.weight_decay == 0.01
    assert loaded.sources["optimizer.lr"] == f"{tmp_path}/r.yaml:3"
    assert loaded.sources["optimizer.weight_decay"] == "default"


@pytest.mark.parametrize("path", shipped("recipes"), ids=lambda path: path.name)
def test_every_shipped_recipe_loads(path: Path) -> None:
    assert load_settings(path).settings.run.max_steps


def test_without_a_recipe_the_demo_is_loaded_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    loaded = load_settings(None)
    assert loaded.settings.model.path == "tiny"
    assert loaded.sources["model.path"].startswith("recipes/demo.yaml:")
    assert load_settings(Path("recipes/lora.yaml")).settings.model.lora is not None


def test_a_recipe_in_the_working_directory_goes_before_the_shipped_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes/demo.yaml").write_text("run: {max_steps: 3, name: mine}\n")
    monkeypatch.chdir(tmp_path)
    assert load_settings(Path("recipes/demo.yaml")).settings.run.name == "mine"


def test_short_forms_of_precision_and_schedule(tmp_path: Path) -> None:
    settings = load(
        tmp_path, MINIMAL + "precision: fp16\nschedule: cosine\n", overrides=["precision.tf32=false"]
    ).settings
    assert (settings.precision.mode, settings.precision.tf32, settings.schedule.kind) == ("fp16", False, "cosine")


@pytest.mark.parametrize(
    ("text", "value"), [("1e-5", 1e-5), ("1E-5", 1e-5), ("2", 2.0), (".5", 0.5), ("+3.0", 3.0), ("0.00001", 1e-5)]
)
def test_numbers_are_read_as_in_yaml_1_2(tmp_path: Path, text: str, value: float) -> None:
    assert load(tmp_path, f"{MINIMAL}optimizer:\n  lr: {text}\n").settings.optimizer.lr == value


def test_words_that_yaml_1_1_takes_for_booleans_and_octal_numbers_are_not(tmp_path: Path) -> None:
    loaded = load(tmp_path, "run:\n  max_steps: 010\n  name: no\n")
    assert (loaded.settings.run.max_steps, loaded.settings.run.name) == (10, "no")


def test_a_byte_order_mark_and_windows_line_ends_change_nothing(tmp_path: Path) -> None:
    text = b"\xef\xbb\xbfrun:\r\n  max_steps: 10\r\n  name: first\r\n"
    loaded = load(tmp_path, text)
    assert loaded.settings.run.name == "first"
    assert loaded.sources["run.name"].endswith(":3")


def test_a_data_set_given_as_the_recipe_is_told_where_it_goes(tmp_path: Path) -> None:
    manifest = tmp_path / "train.jsonl"
    manifest.write_text('{"source": "a.png", "instruction": "x", "target": "b.png"}\n')
    with pytest.raises(SettingsError, match=r"is no recipe.*data\.manifest=.*train\.jsonl"):
        load_settings(manifest)


def test_anchors_are_followed(tmp_path: Path) -> None:
    recipe = "run: {max_steps: &n 10}\ncheckpoint: {every: *n}\n"
    assert load(tmp_path, recipe).settings.checkpoint.every == 10


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        ("", ["r.yaml is empty"]),
        ("# only a comment\n", ["r.yaml is empty"]),
        ("- a\n- b\n", ["r.yaml holds a list"]),
        ("just a text\n", ["r.yaml holds the single value"]),
        ("run: {max_steps: 1\n", ["r.yaml:", "not YAML"]),
        ("run:\n\tmax_steps: 1\n", ["r.yaml:2", "tabs"]),
        ("run: {max_steps: 1}\n---\nrun: {max_steps: 2}\n", ["one document"]),
        ("run: !!python/object:os.system {}\n", ["r.yaml:1", "tag"]),
        ("run: {max_steps: !x 3}\n", ["r.yaml:1", "tag"]),
        ("run:\n  max_steps: 1\n  seed: 0\n  max_steps: 2\n", ["r.yaml:4", "second time", "r.yaml:2"]),
        ("run: {max_steps: 1}\n1: a\n", ["r.yaml:2", "key 1"]),
        ("run: &r {max_steps: *r}\n", ["without end"]),
        (b"run: {name: caf\xe9}\n", ["r.yaml:1", "not UTF-8", "0xe9"]),
        ("run: {max_steps: 1}".encode("utf-16"), ["not UTF-8", "UTF-16"]),
        (b"run: {name: 'a\x00b'}\n", ["r.yaml:1", "cannot be in YAML"]),
        ("a: " + "[" * 3000, ["r.yaml"]),
        (b"x" * (1 << 21), ["not a settings file"]),
    ],
)
def test_what_is_no_recipe_is_refused_with_its_place(tmp_path: Path, recipe: str | bytes, words: list[str]) -> None:
    text = message(tmp_path, recipe)
    assert all(word in text for word in words), text


def test_a_missing_recipe_is_answered_with_the_nearest_shipped_one(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"recipes/demo\.yml does not exist.*did you mean recipes/demo\.yaml\?"):
        load_settings(Path("recipes/demo.yml"))
    with pytest.raises(SettingsError, match="is a folder"):
        load_settings(tmp_path)


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("batch: {globl_size: 8}", "batch.globl_size is not a setting; did you mean batch.global_size?"),
        ("bach: {global_size: 8}", "bach is not a setting; did you mean batch?"),
        ("lr: 1e-5", "lr is not a setting; did you mean optimizer.lr?"),
        ("optimizer: {learning_rate: 1e-5}", "did you mean optimizer.lr?"),
        ("model: {lora: {ranks: 8}}", "model.lora.ranks is not a setting; did you mean model.lora.rank?"),
        ("batch.global_size: 8", "write it nested: batch: {global_size: ...}"),
        ("gradient_accumulation_steps: 8", "derived"),
        ("batch: {zzz: 8}", "batch has: global_size, micro_size"),
    ],
)
def test_an_unknown_key_is_answered_with_the_nearest_name(tmp_path: Path, line: str, hint: str) -> None:
    text = message(tmp_path, MINIMAL + line + "\n")
    assert text.startswith("r.yaml:3: ")
    assert hint in text


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('batch: {micro_size: "8"}', 'batch.micro_size is "8"; it must be a whole number, and it is a text'),
        ('optimizer: {lr: "1e-5"}', 'optimizer.lr is "1e-5"; it must be a number, and it is a text'),
        ("batch: {micro_size: 1.5}", "batch.micro_size is 1.5; it must be a whole number"),
        ("batch: {micro_size: 2.0}", "a whole number: write 2"),
        ("batch: {micro_size: 0}", "it must be greater than 0"),
        ("batch: {micro_size: true}", "batch.micro_size is true; it must be a whole number"),
        ("model: {compile: yes}", 'model.compile is "yes"; it must be true or false'),
        ("model: {freeze: a.*}", 'it must be a list: write ["a.*"]'),
        ("precision: bf17", "it must be bf16, fp16 or fp32"),
        ("flow: {shift: abc}", 'flow.shift is "abc"; it must be dynamic or none or a number'),
        ("optimizer: {betas: [0.9]}", "optimizer.betas"),
        ("optimizer: {betas: [0.9, 1.5]}", "less than 1"),
        ("optimizer: {lr: .nan}", "optimizer.lr"),
        ("optimizer: {lr: .inf}", "finite"),
        ("batch: 8", "batch is 8; it must be a section"),
        ("run: ", "second time"),
        ("optimizer: {clip_norm: 0}", "greater than 0"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named_with_what_it_must_be(tmp_path: Path, line: str, words: str) -> None:
    text = message(tmp_path, MINIMAL + line + "\n")
    assert text.startswith("r.yaml:3: ")
    assert words in text


def test_all_mistakes_are_listed_together_in_the_order_of_the_file(tmp_path: Path) -> None:
    recipe = "run:\n  max_stps: 3\n  seed: -1\nbatch:\n  micro_size: x\nprecision: bf17\n"
    lines = message(tmp_path, recipe, overrides=["optimizer.lr=-1"]).splitlines()
    assert lines[0] == "settings: 5 things are wrong"
    assert [line.strip().split(" ")[0] for line in lines[1:]] == [
        "r.yaml:2:", "r.yaml:3:", "r.yaml:5:", "r.yaml:6:", "override:"
    ]  # fmt: skip


def test_a_run_without_an_end_is_refused(tmp_path: Path) -> None:
    assert "never end" in message(tmp_path, "run: {name: a}\n")
