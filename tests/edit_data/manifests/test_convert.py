"""`qwen-edit-zero data convert`: what is written reads as the same samples."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from qwen_edit_zero import cli
from qwen_edit_zero.edit_data.manifests.convert import convert_manifest
from qwen_edit_zero.edit_data.manifests.opening import open_manifest
from qwen_edit_zero.edit_data.manifests.table import SampleTable
from qwen_edit_zero.errors import DataError, SettingsError
from tests.edit_data.builders import CASES, row, save, save_pictures, write_manifest
from tests.edit_data.manifests.test_formats import ai_toolkit_folders, embedded, parquet, sample_members, shard, written


def meaning(table: SampleTable) -> list[object]:
    """What samples say, with the bytes of their pictures in place of names."""
    return [
        (
            s.id, s.instruction, s.category, s.weight, s.split, s.paraphrases,
            [file.read(1 << 20) for file in (*s.sources, s.target, *([s.mask] if s.mask else []))],
        )
        for s in table
    ]  # fmt: skip


def test_our_own_manifest_keeps_every_value_wherever_it_goes(tmp_path: Path) -> None:
    rows = [
        row(0), row(1, 3, category="c", weight=0.3, split="test", mask="s1_0.png", paraphrases=["y", "z"]),
        {key: value for key, value in row(2).items() if key != "id"},
    ]  # fmt: skip
    (tmp_path / "set" / "pictures").mkdir(parents=True)
    save_pictures(tmp_path / "set" / "pictures", rows)
    path = write_manifest(tmp_path / "set" / "pictures", rows)
    before = open_manifest(path)
    done = convert_manifest(str(path), tmp_path / "set" / "new.jsonl")
    after = open_manifest(tmp_path / "set" / "new.jsonl")
    assert meaning(after) == meaning(before)
    assert after[0].target_name == "pictures/t0.png", "names follow the folder of the new manifest"
    assert (done.rows, done.pictures, done.outside, done.refused) == (3, 0, [], [])


def test_folders_of_pairs_become_rows(tmp_path: Path) -> None:
    ai_toolkit_folders(tmp_path)
    convert_manifest(str(tmp_path), tmp_path / "new.jsonl")
    assert meaning(open_manifest(tmp_path / "new.jsonl")) == meaning(open_manifest(tmp_path))


def test_pictures_in_archives_become_files_byte_for_byte(tmp_path: Path) -> None:
    parquet(tmp_path / "p.parquet", source=embedded(1, 2), target=embedded(3, 4), instruction=["x", "y"])
    shard(tmp_path / "s.tar", [*sample_members("a/1", 1), *sample_members("2", 5)])
    for name, pictures in (("p.parquet", 4), ("s.tar", 6)):
        out = tmp_path / f"{name}.jsonl"
        done = convert_manifest(str(tmp_path / name), out)
        assert done.pictures == pictures
        assert meaning(open_manifest(out)) == meaning(open_manifest(tmp_path / name))
        assert {p.suffix for p in (tmp_path / f"{name}_pictures").rglob("*") if p.is_file()} == {".png"}, "by content"


def test_pictures_outside_the_new_folder_are_told(tmp_path: Path) -> None:
    ai_toolkit_folders(tmp_path / "set")
    (tmp_path / "out").mkdir()
    done = convert_manifest(str(tmp_path / "set"), tmp_path / "out" / "new.jsonl")
    assert done.outside == [str(tmp_path / "set" / name) for name in ("control1", "control2", "target")]
    with pytest.raises(DataError, match=r"data\.outside"):
        open_manifest(tmp_path / "out" / "new.jsonl")
    assert len(open_manifest(tmp_path / "out" / "new.jsonl", outside=[str(tmp_path / "set")])) == 3


def test_nothing_is_overwritten_and_nothing_half_is_left(tmp_path: Path) -> None:
    path = write_manifest(tmp_path, [row(0), {"id": "bad"}])
    for name in ("new.jsonl", "new_pictures", "new_left_out.jsonl"):
        (tmp_path / name).write_text("mine")
        with pytest.raises(DataError, match="is not overwritten"):
            convert_manifest(str(path), tmp_path / "new.jsonl")
        assert (tmp_path / name).read_text() == "mine"
        (tmp_path / name).unlink()
    with pytest.raises(DataError, match="1 row cannot be used"):
        convert_manifest(str(path), tmp_path / "new.jsonl")
    with pytest.raises(DataError, match="there is no folder"):
        convert_manifest(str(path), tmp_path / "none" / "new.jsonl")
    assert [p.name for p in tmp_path.iterdir()] == ["data.jsonl"]


def test_the_command_reports_counts_and_what_was_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(CASES / "csv" / "bom_and_quotes.csv", tmp_path / "metadata.csv")
    for name in ("s/a,1.png", "t/a1.png"):
        save(tmp_path / name)
    out = tmp_path / "new.jsonl"
    with pytest.raises(DataError, match=r"data\.on_error=skip"):
        cli._run(["data", "convert", str(tmp_path), str(out)])
    assert cli._run(["data", "convert", str(tmp_path), str(out), "--skip"]) == 0
    told = capsys.readouterr().out
    assert "DiffSynth metadata.csv, 1 row, 1 refused" in told
    assert 'left out: line 4: "prompt" is empty' in told
    assert f"written: 1 row to {out}" in told
    assert json.loads((tmp_path / "new_left_out.jsonl").read_text())["line"] == 4


def test_rows_whose_pictures_are_not_there_are_counted_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(i, 2) for i in range(9)]
    save_pictures(tmp_path, rows)
    rows[1]["mask"] = "mask.png"
    manifest = str(write_manifest(tmp_path, rows))
    for name in ("s0_1.png", *(f"t{i}.png" for i in range(2, 8))):
        (tmp_path / name).unlink()
    (tmp_path / "T3.png").touch()
    for number, (options, status) in enumerate([([], 0), (["--strict"], 2)]):
        assert cli._run(["data", "convert", manifest, str(tmp_path / f"new{number}.jsonl"), *options]) == status
        told = capsys.readouterr().out
        assert "8 of 9 rows name pictures that are not there" in told
        assert 'line 1 ("a0"): picture "s0_1.png" is not there' in told
        assert 'line 2 ("a1"): picture "mask.png" is not there' in told
        assert 'line 4 ("a3"): picture "t3.png" is not there' in told
        assert "T3.png" in told
        assert "and 3 more" in told
    (tmp_path / "t8.png").unlink()
    assert cli._run(["data", "convert", manifest, str(tmp_path / "none.jsonl")]) == 2, "no row has its pictures"
    assert len(open_manifest(tmp_path / "none.jsonl")) == 9, "it is written all the same"
    save_pictures(tmp_path, rows)
    save(tmp_path / "mask.png")
    capsys.readouterr()
    assert cli._run(["data", "convert", manifest, str(tmp_path / "whole.jsonl"), "--strict"]) == 0
    assert "not there" not in capsys.readouterr().out


def test_many_rows_left_out_are_summed_up_by_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(0), *(row(i, weight=-i) for i in range(1, 14))]
    save_pictures(tmp_path, rows)
    manifest = str(write_manifest(tmp_path, rows))
    assert cli._run(["data", "convert", manifest, str(tmp_path / "new.jsonl"), "--skip"]) == 0
    told = capsys.readouterr().out
    assert "left out: 3 more rows" in told
    assert "       13  ... is -N; it must be a finite number over N" in told


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--format", "parket"], "did you mean parquet?"), (["--columns", "target"], "is no mapping")],
)
def test_wrong_options_are_named(tmp_path: Path, options: list[str], words: str) -> None:
    path = written(tmp_path / "x.jsonl", "{}")
    with pytest.raises(SettingsError) as error:
        cli._run(["data", "convert", str(path), str(tmp_path / "new.jsonl"), *options])
    assert words in str(error.value)
