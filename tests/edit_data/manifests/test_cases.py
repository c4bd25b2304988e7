"""Our JSON Lines as the cases say: what is read, what is refused with place and reason, what pictures are found."""

from __future__ import annotations

import json
import os
import unicodedata
from pathlib import Path

import pytest

from qwen_edit_zero.edit_data.cache.facts import Facts
from qwen_edit_zero.edit_data.cache.ranks import Ranks
from qwen_edit_zero.edit_data.cache.survey import Surveyor
from qwen_edit_zero.edit_data.manifests.opening import open_manifest
from qwen_edit_zero.edit_data.manifests.samples import Refusal, refuse_or_raise
from qwen_edit_zero.edit_data.manifests.table import SampleTable
from qwen_edit_zero.errors import DataError
from tests.edit_data.builders import CASES, save, write_manifest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with the pictures that the collected manifests name."""
    for name in ("a1", "a2", "a2b", "a3", "a4"):
        save(tmp_path / "s" / f"{name}.png")
    for name in ("a1", "a2", "a3", "a4", "a4b", "a5"):
        save(tmp_path / "t" / f"{name}.png")
    return tmp_path


def read_case(folder: Path, name: str, **options: object) -> SampleTable:
    (folder / name).write_bytes((CASES / "jsonl" / name).read_bytes())
    return open_manifest(folder / name, **options)  # type: ignore[arg-type]


def read_text(folder: Path, text: str | bytes, **options: object) -> SampleTable:
    path = folder / "data.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return open_manifest(path, **options)  # type: ignore[arg-type]


def problem(table: SampleTable, folder: Path) -> str:
    """What training and `data check` find when they look at the pictures of the first row."""
    with Facts(folder / "facts", Ranks()) as facts, Surveyor(facts, references=3) as surveyor:
        return next(surveyor.chunks(table, range(1))).reasons[0]


def line(**changes: object) -> str:
    values = {"id": "a1", "source": "s/a1.png", "target": "t/a1.png", "instruction": "x", **changes}
    return json.dumps({key: value for key, value in values.items() if value is not ...}) + "\n"


def test_a_sound_manifest_is_read_in_order(folder: Path) -> None:
    manifest = read_case(folder, "ok.jsonl")
    assert [s.id for s in manifest] == ["a1", "a2", "a3"]
    second = manifest[1]
    assert [s.name for s in second.sources] == [str(folder / "s/a2.png"), str(folder / "s/a2b.png")]
    assert second.target.name == str(folder / "t/a2.png")
    assert second.instruction == "把背景换成雪地"
    assert (second.weight, second.category, second.line) == (1.0, None, 2)
    assert manifest[2].instruction == "add a 🎈 next to the dog"


@pytest.mark.parametrize("name", ["bom_utf8.jsonl", "crlf.jsonl"])
def test_byte_order_mark_and_windows_line_ends_change_nothing(folder: Path, name: str) -> None:
    odd = read_case(folder, name)
    assert list(odd) == list(read_case(folder, "ok.jsonl"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("utf16le_bom.jsonl", ["not UTF-8"]),
        ("gbk.jsonl", ["line 2", "not UTF-8"]),
        ("latin1_byte.jsonl", ["line 1", "byte 87", "0xE9"]),
        ("truncated_last_line.jsonl", ["line 4", "cut short"]),
        ("two_objects_one_line.jsonl", ["line 1", "one object a line"]),
        ("json_array.jsonl", ["JSON array", "jq"]),
        ("pretty_printed.jsonl", ["spread over many lines", "jq"]),
        ("comment_line.jsonl", ["line 1", "comment"]),
        ("duplicate_ids.jsonl", ["line 3", "line 1", '"a1"']),
        ("nan_infinity.jsonl", ["line 1", "NaN", "line 2", "Infinity"]),
        ("missing_source.jsonl", ["line 1", '"source" is missing']),
        ("missing_instruction.jsonl", ["line 1", '"instruction" is missing']),
        ("wrong_types.jsonl", [f"line {i}:" for i in range(2, 9)]),
        ("zero_refs.jsonl", ["line 1", "at least one reference"]),
        ("five_refs.jsonl", ["line 1", "5 pictures", "at most 3"]),
        ("windows_paths.jsonl", ["line 2", "drive"]),
        ("only_newlines.jsonl", ["no sample"]),
        ("deep_nesting.jsonl", ["line 1", "nested"]),
    ],
)
def test_a_wrong_manifest_is_refused_with_place_and_reason(folder: Path, name: str, words: list[str]) -> None:
    with pytest.raises(DataError) as error:
        read_case(folder, name)
    for word in [name, *words]:
        assert word in str(error.value)


def test_paths_that_leave_the_folder_are_all_refused(folder: Path) -> None:
    rows = (CASES / "jsonl" / "path_escape.jsonl").read_text().splitlines()
    with pytest.raises(DataError) as error:
        read_case(folder, "path_escape.jsonl")
    for number in range(1, len(rows) + 1):
        assert f"line {number}:" in str(error.value)
    assert "is not there" not in str(error.value), "refused by its spelling, before the disk was looked at"


def test_a_string_is_one_source_and_the_same_one_twice_stays_twice(folder: Path) -> None:
    assert read_case(folder, "wrong_types.jsonl", on_error="skip")[0].source_names == ("s/a1.png",)
    assert read_case(folder, "same_ref_twice.jsonl")[0].source_names == ("s/a1.png", "s/a1.png")


def test_skipping_keeps_the_good_rows_and_lists_the_others(folder: Path) -> None:
    manifest = read_case(folder, "wrong_types.jsonl", on_error="skip")
    assert [s.id for s in manifest] == ["a1"]
    assert [r.line for r in manifest.refused] == list(range(2, 9))
    with pytest.raises(DataError, match="no row can be used"):
        read_case(folder, "nan_infinity.jsonl", on_error="skip")


def test_a_mistake_of_the_whole_file_stops_under_skip_too(folder: Path) -> None:
    for name in ("utf16le_bom.jsonl", "json_array.jsonl", "pretty_printed.jsonl", "only_newlines.jsonl"):
        with pytest.raises(DataError):
            read_case(folder, name, on_error="skip")


def test_odd_file_names_are_taken_literally(tmp_path: Path) -> None:
    names = [path.name for path in sorted((CASES / "names").iterdir())]
    assert len(names) >= 8
    for name in names:
        (tmp_path / name).write_bytes((CASES / "names" / name).read_bytes())
    rows = [{"source": name, "target": names[0], "instruction": str(i)} for i, name in enumerate(names)]
    manifest = open_manifest(write_manifest(tmp_path, rows))
    assert [Path(s.sources[0].name).name for s in manifest] == names


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("case_mismatch.jsonl", 'the manifest\'s folder has "s"; letter case counts'),
        ("windows_paths.jsonl", 'a backslash is no separator here; write "t/a1.png"'),
    ],
)
def test_names_that_the_disk_spells_otherwise_are_told_with_its_spelling(folder: Path, name: str, words: str) -> None:
    assert words in problem(read_case(folder, name, on_error="skip"), folder)


def test_a_target_that_is_a_folder_is_refused(folder: Path) -> None:
    (folder / "target.png").mkdir()
    assert 'target.png": it is a folder' in problem(read_text(folder, line(target="target.png")), folder)


def test_a_pipe_is_refused_without_waiting_for_a_writer(folder: Path) -> None:
    os.mkfifo(folder / "pipe.png")
    assert "not a regular file" in problem(read_text(folder, line(source="pipe.png")), folder)
    with pytest.raises(DataError, match="not a regular file"):
        open_manifest(folder / "pipe.png")


def test_two_spellings_that_look_the_same_are_shown_apart(tmp_path: Path) -> None:
    save(tmp_path / "café.png")
    (tmp_path / unicodedata.normalize("NFC", "café.png")).rename(tmp_path / unicodedata.normalize("NFD", "café.png"))
    rows = [{"source": unicodedata.normalize("NFC", "café.png"), "target": "café.png", "instruction": "x"}]
    found = problem(open_manifest(write_manifest(tmp_path, rows)), tmp_path)
    assert '"caf\\u00e9.png"' in found
    assert '"cafe\\u0301.png"' in found


def test_a_missing_picture_is_named_with_the_nearest_name(folder: Path) -> None:
    found = problem(read_text(folder, line(source="s/a2c.png")), folder)
    assert '"s/a2c.png" is not there: "s" has no "a2c.png"; the nearest name there is "a2' in found
    found = problem(read_text(folder, line(source="zzzzzz/a.png")), folder)
    assert 'the manifest\'s folder has no "zzzzzz" and nothing like it' in found


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"instructon": "x"}, 'unknown key "instructon"; did you mean "instruction"'),
        ({"zzz": 1}, "the keys are id, source"),
        ({"weight": 0}, "over 0"),
        ({"weight": -1}, "over 0"),
        ({"weight": True}, "true or false"),
        ({"weight": 10**400}, "finite"),
        ({"weight": "2"}, "text, not a number"),
        ({"instruction": "  "}, '"instruction" is empty'),
        ({"instruction": "\ud800"}, "surrogate"),
        ({"instruction": None}, "missing"),
        ({"category": 3}, '"category" is a number'),
        ({"id": ""}, '"id" is empty'),
        ({"id": True}, '"id" is true or false'),
        ({"source": "a\0b"}, "NUL"),
        ({"target": {}}, '"target" is an object'),
    ],
)
def test_values_are_checked_strictly(folder: Path, changes: dict[str, object], reason: str) -> None:
    with pytest.raises(DataError) as error:
        read_text(folder, line(**changes))
    assert reason in str(error.value)


def test_a_key_that_stands_twice_is_refused(folder: Path) -> None:
    with pytest.raises(DataError, match='"target" stands in it twice'):
        read_text(folder, '{"source":"s/a1.png","target":"t/a1.png","target":"t/a2.png","instruction":"x"}')


def test_optional_values_and_inner_dots_are_taken(folder: Path) -> None:
    text = line(id=7, category="recolour", weight=2, source="s/../t/./a1.png") + line(id=None, category=None)
    first, second = read_text(folder, text)
    assert (first.id, first.category, first.weight, first.source_names) == ("7", "recolour", 2.0, ("t/a1.png",))
    assert (second.category, second.weight) == (None, 1.0)


def test_an_id_made_from_content_does_not_depend_on_the_rows_place(folder: Path) -> None:
    one, two = line(id=...), line(id=..., source="s/a2.png")
    there = {s.source_names: s.id for s in read_text(folder, one + two)}
    back = {s.source_names: s.id for s in read_text(folder, two + "\n" + one)}
    assert there == back
    assert len(set(there.values())) == 2


def test_the_same_row_twice_without_ids_is_refused_and_with_ids_is_two_samples(folder: Path) -> None:
    with pytest.raises(DataError, match=r"line 2.*of line 1"):
        read_text(folder, line(id=...) * 2)
    assert len(read_text(folder, line(id="x") + line(id="y"))) == 2


def test_all_wrong_rows_are_counted_and_the_first_ten_explained(folder: Path) -> None:
    with pytest.raises(DataError) as error:
        read_text(folder, line(weight=0) * 25)
    assert "25 rows" in str(error.value)
    assert "line 10:" in str(error.value)
    assert "line 11:" not in str(error.value)
    assert "and 15 more" in str(error.value)


def test_files_that_cannot_be_a_manifest_are_named(folder: Path) -> None:
    save(folder / "p.png")
    with pytest.raises(DataError, match="there is no such file"):
        open_manifest(folder / "none.jsonl")
    (folder / "train.jsonl").write_text(line())
    with pytest.raises(DataError, match=r'the nearest name there is "train\.jsonl"'):
        open_manifest(folder / "trian.jsonl")
    with pytest.raises(DataError, match="no set that is known"):
        open_manifest(folder / "s")
    with pytest.raises(DataError, match=r"p\.png"):
        open_manifest(folder / "p.png")
    with pytest.raises(DataError, match="the file is empty"):
        read_text(folder, "")


def test_more_references_are_taken_where_the_setting_allows(folder: Path) -> None:
    five = [f"s/{name}.png" for name in ("a1", "a2", "a2b", "a3", "a4")]
    assert read_text(folder, line(source=five), max_references=5)[0].source_names == tuple(five)


def test_rows_refused_later_stop_the_run_unless_they_are_skipped_and_others_are_left(tmp_path: Path) -> None:
    refused = [Refusal(7, "a7", "picture x: it is a folder")]
    with pytest.raises(DataError, match=r"1 row cannot be used\n  line 7 \(\"a7\"\): picture x"):
        refuse_or_raise(refused, left=10, path=tmp_path, on_error="stop")
    refuse_or_raise(refused, left=10, path=tmp_path, on_error="skip")
    with pytest.raises(DataError, match="no row can be used"):
        refuse_or_raise(refused, left=0, path=tmp_path, on_error="skip")
    refuse_or_raise([], left=10, path=tmp_path, on_error="stop")
