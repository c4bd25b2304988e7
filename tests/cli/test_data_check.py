"""`qwen-edit-zero data check`: manifests and recipes, exit statuses, mistakes in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from qwen_edit_zero.commands import check as check_command
from qwen_edit_zero.edit_data.cache.locks import CacheLock, try_lock
from qwen_edit_zero.errors import StorageError, UserError
from qwen_edit_zero.training import data_check
from tests.edit_data.builders import save, write_manifest
from tests.edit_data.check.checked import scene

AREAS = ("data.vae_area=65536", "data.condition_area=16384")


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    """One clean row, over which others can be written."""
    image = scene(1, 256, 256)
    image.save(tmp_path / "a.png")
    image.paste("orange", (50, 50, 150, 150))
    image.save(tmp_path / "b.png")
    return write_manifest(tmp_path, [row("x")])


def row(id_: str, **changes: object) -> dict[str, object]:
    return {"id": id_, "source": "a.png", "target": "b.png", "instruction": f"make {id_} orange", **changes}


def check(*arguments: object) -> int:
    return check_command.run([*map(str, arguments)])


def test_exit_statuses(manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = ("--out", tmp_path / "out")
    assert check(manifest, *out, *AREAS) == 0
    write_manifest(tmp_path, [row("x"), row("y", target="c.png")])
    assert check(*out, *AREAS, manifest) == 1
    assert "data.on_error=stop" in capsys.readouterr().out
    assert [json.loads(line)["id"] for line in (tmp_path / "out/clean.jsonl").open()] == ["x"]
    write_manifest(tmp_path, [row("x"), row("y", target="a.png")])
    assert check(manifest, *out, *AREAS) == 1
    assert check(manifest, *out, *AREAS, "--strict") == 2
    write_manifest(tmp_path, [row("x", target="c.png")])
    assert check(manifest, *out, *AREAS) == 2
    assert "none of 1 rows can be used" in capsys.readouterr().out


def test_a_run_may_begin_during_a_check(manifest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, got = data_check.check_table, []

    def looked_into(asked: Any, new_bar: Any) -> Any:
        with (asked.cache / CacheLock.NAME).open("r+b") as file:
            got.append(try_lock(file.fileno(), shared=True))
        return real(asked, new_bar)

    monkeypatch.setattr(data_check, "check_table", looked_into)
    assert check(manifest, "--out", tmp_path / "out", *AREAS) == 0
    assert got == ["held"]


def test_a_recipe_is_checked_with_its_model_and_its_cache(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("qwen_edit_zero.edit_data.storage.files._TOO_YOUNG_NS", -1)
    write_manifest(tmp_path, [row("x"), row("long", instruction="改" * 2000)])
    recipe = tmp_path / "recipe.yaml"
    data = {"manifest": str(manifest), "vae_area": 65536, "cache_dir": str(tmp_path / "cache"), "on_error": "skip"}
    recipe.write_text(yaml.safe_dump({"run": {"max_steps": 2}, "model": {"path": "tiny"}, "data": data}))
    assert check(recipe, "--out", tmp_path / "out", "data.condition_area=16384") == 1
    told = capsys.readouterr().out
    assert "tokens; the model takes at most 1024" in told
    assert "instruction, tokens" in told
    assert {path.name for path in (tmp_path / "cache").iterdir()} >= {"facts", "check", "manifests"}
    assert check(recipe, "--out", tmp_path / "out", "data.condition_area=16384", "model.path=/nowhere") == 1
    told = capsys.readouterr().out
    assert "for want of a tokenizer" in told
    assert "probably too long" in told


def test_other_formats_are_read_as_training_reads_them(
    manifest: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "metadata.csv").write_text("image,edit_image,prompt\nb.png,a.png,make it orange\n")
    assert check(tmp_path / "metadata.csv", "--out", tmp_path / "out", *AREAS) == 0
    assert check(tmp_path / "metadata.csv", "--format", "diffsynth", "--out", tmp_path / "out", *AREAS) == 0
    assert "DiffSynth" in capsys.readouterr().out
    for name, file in (("target", "b.png"), ("control", "a.png")):
        (tmp_path / "set" / name).mkdir(parents=True)
        (tmp_path / "set" / name / "1.png").write_bytes((tmp_path / file).read_bytes())
    (tmp_path / "set/target/1.txt").write_text("make it orange")
    dataset = {"folder_path": str(tmp_path / "set/target"), "control_path": str(tmp_path / "set/control")}
    config = tmp_path / "set/job.yaml"
    config.write_text(yaml.safe_dump({"config": {"process": [{"datasets": [dataset]}]}}))
    assert check(config, "--out", tmp_path / "out", *AREAS, f'data.outside=["{tmp_path}"]') == 0
    assert "ai-toolkit" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), ["nothing is given to check"]),
        (("a.jsonl", "b.jsonl"), ["a.jsonl and b.jsonl"]),
        (("a.jsonl", "--outt", "x"), ["unknown option --outt"]),
        (("a.jsonl", "data.vae_aera=4"), ["vae_aera", "vae_area"]),
        (("a.jsonl", "data.manifest=b.jsonl"), ["both name a manifest"]),
        (("a.jsonl", "--workers", "0"), ["no number of processes"]),
        (("not_there.jsonl",), ["not_there.jsonl"]),
        (("recipes/not_there.yaml",), ["does not exist"]),
        (("a.jsonl", "--format", "csvv"), ["csvv"]),
        (("a.jsonl", "model.path=/nowhere"), ["/nowhere"]),
    ],
)
def test_mistakes_are_told_in_a_line(
    arguments: tuple[str, ...], words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_manifest(tmp_path, [row("x")], "a.jsonl")
    with pytest.raises(UserError) as told:
        check(*arguments)
    assert told.value.exit_status == 2
    assert all(word in str(told.value) for word in words), told.value


def test_results_that_cannot_be_written_are_an_error_of_their_own(manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    with pytest.raises(StorageError, match="--out names another folder"):
        check(manifest, "--out", tmp_path / "out", f"data.cache_dir={tmp_path / 'cache'}", *AREAS)


def test_nothing_of_it_needs_torch(manifest: Path, tmp_path: Path) -> None:
    save(tmp_path / "c.png")
    code = (
        "import sys; from qwen_edit_zero.cli import main\n"
        "status = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules and 'diffusers' not in sys.modules, 'torch was imported'\n"
        "sys.exit(status)"
    )
    arguments = ["data", "check", manifest, "--out", tmp_path / "out", "model.path=tiny", *AREAS]
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    done = subprocess.run(
        [sys.executable, "-c", code, "data", "check", "--help"], capture_output=True, text=True, check=False
    )
    assert "exit status" in done.stdout


def scenes(folder: Path, *numbers: int) -> None:
    """Pictures `sN.png` and, with something painted on it, `tN.png`."""
    for number in numbers:
        image = scene(number, 256, 256)
        image.save(folder / f"s{number}.png")
        image.paste("orange", (50, 50, 150, 150))
        image.save(folder / f"t{number}.png")


def of(number: int, **changes: object) -> dict[str, object]:
    return row(f"r{number}", source=f"s{number}.png", target=f"t{number}.png") | changes


def test_the_held_out_set_is_checked_too_and_rows_in_both_sets_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scenes(tmp_path, 1, 2, 3, 4, 5)
    manifest = write_manifest(tmp_path, [of(1), of(2), of(3)])
    held = [of(1, id="other"), of(4, id="r2"), of(5, target="gone.png"), of(5, id="fine"), {"id": "wrong"}]
    validation = write_manifest(tmp_path, held, name="validation.jsonl")
    given = (manifest, "--out", tmp_path / "out", *AREAS, f"data.validation={validation}")
    assert check(*given, "validation.every=5", "validation.samples=2", "sampling.count=1") == 1
    told = capsys.readouterr().out
    assert "3 of 3 rows are clean" in told
    assert "1 of 5 rows are clean; 2 should be looked at; 2 are left out" in told
    assert "of 5 held-out rows a run pictures 1 (sampling.count); the loss of 2 is computed" in told
    assert "data.on_error=stop" in told
    findings = [json.loads(line) for line in (tmp_path / "out/held_out/findings.jsonl").open()]
    assert {(f["id"], f["kind"]) for f in findings if f["level"] != "note"} == {
        ("other", "trained-on"), ("r2", "id-trained-on"), ("r5", "missing"), (None, "row")
    }  # fmt: skip
    (copy,) = [f["reason"] for f in findings if f["kind"] == "trained-on"]
    assert copy == "it has the pictures of line 1 (id r1) of the training set"
    for page in ("report.html", "held_out/report.html"):
        assert copy in (tmp_path / "out" / page).read_text(encoding="utf-8")
    assert [json.loads(line)["id"] for line in (tmp_path / "out/findings.jsonl").open()] == []
    assert check(*given, "--strict") == 2
    write_manifest(tmp_path, [of(5)], name="validation.jsonl")
    assert check(*given) == 0
    write_manifest(tmp_path, [of(5, target="gone.png")], name="validation.jsonl")
    assert check(*given) == 1, "training goes on without pictures"
    assert check(*given, "validation.every=5") == 2, "and does not begin without a loss it is to compute"
    capsys.readouterr()
    assert check(manifest, "--out", tmp_path / "alone", *AREAS) == 0
    assert "Held-out" not in capsys.readouterr().out
    assert not (tmp_path / "alone/held_out").exists()


def test_a_split_of_the_manifest_is_a_held_out_set(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenes(tmp_path, 1, 2)
    rows = [of(1, split="train"), of(2, split="test"), of(1, id="copy", split="test"), {"id": "wrong"}]
    manifest = write_manifest(tmp_path, rows)
    splits = ("data.split=train", "data.validation_split=test")
    assert check(manifest, "--out", tmp_path / "out", *AREAS, *splits) == 1
    told = capsys.readouterr().out
    assert "1 of 2 rows are clean; 1 are left out" in told
    assert "1 of 2 rows are clean; 1 should be looked at" in told, "what is wrong in itself is told once"
    findings = [json.loads(line) for line in (tmp_path / "out/held_out/findings.jsonl").open()]
    assert [(f["id"], f["kind"]) for f in findings] == [("copy", "trained-on")]
