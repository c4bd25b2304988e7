"""Manifests of other trainers and data sets, recognised by content; their layouts are those of their documentation."""

from __future__ import annotations

import io
import json
import shutil
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from qwen_edit_zero.edit_data.manifests.opening import open_manifest
from qwen_edit_zero.edit_data.manifests.table import SampleTable
from qwen_edit_zero.errors import DataError
from tests.edit_data.builders import CASES, save

Plain = tuple[Sequence[str], str, str]


def plain(table: SampleTable) -> list[Plain]:
    return [(list(s.source_names), s.instruction, s.target_name) for s in table]


def written(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def lines(path: Path, rows: list[dict[str, Any]]) -> Path:
    return written(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def message(location: Path, **options: Any) -> str:
    with pytest.raises(DataError) as error:
        open_manifest(location, **options)
    return str(error.value)


# DiffSynth-Studio: metadata.csv, .json, .jsonl with image, edit_image, prompt


def test_diffsynth_csv_as_spreadsheets_write_it() -> None:
    """Byte order mark, commas and line breaks in cells; an empty prompt is refused, not read as the word "nan"."""
    table = open_manifest(CASES / "csv" / "bom_and_quotes.csv", on_error="skip")
    assert plain(table) == [(["s/a,1.png"], 'line one\nline two, with "quotes"', "t/a1.png")]
    assert "DiffSynth bom_and_quotes.csv, 1 row, 1 refused" in table.describe()
    assert [str(r) for r in table.refused] == ['line 4: "prompt" is empty']


def test_a_csv_cell_may_hold_a_json_list_of_references(tmp_path: Path) -> None:
    text = 'image,edit_image,prompt\nt.png,"[""a.png"", ""b,1.png""]",x\nt2.png,[c].png,y\n'
    table = open_manifest(written(tmp_path / "metadata.csv", text))
    assert [names for names, _, _ in plain(table)] == [["a.png", "b,1.png"], ["[c].png"]]


def test_diffsynth_csv_with_short_and_long_rows() -> None:
    text = message(CASES / "csv" / "short_row.csv")
    assert "line 2: it has too few cells: 2, and the header has 3" in text
    assert "line 3: it has too many cells: 4" in text


@pytest.mark.parametrize("ending", ["json", "jsonl"])
def test_diffsynth_json_takes_one_reference_or_a_list(tmp_path: Path, ending: str) -> None:
    rows = [
        {"image": "t/1.png", "edit_image": "s/1.png", "prompt": "改色"},
        {
            "image": "t/2.png",
            "edit_image": ["s/2.png", 's/2 }b\\".png'],
            "prompt": 'say "{[]}"',
            "seed": 3,
            "weight": 2,
        },
    ]
    path = tmp_path / f"metadata.{ending}"
    if ending == "json":
        written(path, json.dumps(rows, ensure_ascii=False, indent=2))
    else:
        lines(path, rows)
    for location in (path, tmp_path):
        table = open_manifest(location)
        assert plain(table) == [
            (["s/1.png"], "改色", "t/1.png"), (["s/2.png", "s/2 }b\\\".png"], 'say "{[]}"', "t/2.png"),
        ]  # fmt: skip
        assert table.weights.tolist() == [1, 2]
        assert f'DiffSynth metadata.{ending}, 2 rows; not used: "seed"' in table.describe()
    assert table.lines.tolist() == ([2, 7] if ending == "json" else [1, 2])


def test_a_json_array_is_cut_at_any_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that end inside a character, an escape or between objects."""
    rows = [{"image": f"t{i}.png", "edit_image": 's\\\\\n"é😀.png', "prompt": '\\"}{'} for i in range(3)]
    path = written(tmp_path / "metadata.json", "\ufeff" + json.dumps(rows, ensure_ascii=False, indent=1))
    expected = plain(open_manifest(path))
    from qwen_edit_zero.edit_data.manifests.formats import jsonl

    read = jsonl.read_block
    for size in (1, 2, 3, 7):
        monkeypatch.setattr(
            jsonl, "read_block", lambda file, folder, name, _, size=size: read(file, folder, name, size)
        )
        assert plain(open_manifest(path)) == expected
    assert len(expected) == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('[{"image": "a.png", "edit_image": "b.png", "prompt": "x"}', "does not end"),
        ('[{"image": "a.png", "edit_image": "b.png", "prompt": "x"}, {"image": ', "does not end"),
        ('[{"image": "a.png", "edit_image": "b.png", "prompt": "x"} {}]', 'where "," should be'),
        ('[{"image": "a.png", "edit_image": "b.png", "prompt": "x"}, 3]', "not an array of objects"),
        ('[{"image": "a.png", "edit_image": "b.png", "prompt": "x", "prompt": "y"}]', "stands in it twice"),
        ('[{"image": "a.png", "edit_image": "../b.png", "prompt": "x"}]', '"edit_image" "../b.png": it leads out'),
        ('[{"image": "a.png", "edit_image": "b.png", "prompt": "x"}, {"prompt": "x"}]', '"edit_image" is missing'),
    ],
)
def test_a_wrong_json_array_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    found = message(written(tmp_path / "metadata.json", text))
    assert words in found
    assert "line 1" in found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("image;edit_image;prompt\na;b;c\n", "not separated by commas"),
        ("image,edit_image,prompt,image\na,b,c,d\n", 'column "image" stands in its first line twice'),
        ("\nimage,edit_image,prompt\n", "its first line is empty"),
        ('image,edit_image,prompt\na,b,"c"d\n', "line 2: it is not CSV"),
        ("image,edit_image,prompt,weight\na,b,c,heavy\n", '"weight" is "heavy", not a number'),
        ("image,edit_image,prompt,weight\na,b,c,nan\n", "finite"),
        (
            "image,edit_image,prompt\nt,\"['a', 'b']\",c\n",
            "\"edit_image\" is \"['a', 'b']\", a list as Python prints it",
        ),
    ],
)
def test_a_wrong_csv_is_refused(tmp_path: Path, text: str, words: str) -> None:
    assert words in message(written(tmp_path / "metadata.csv", text), form="diffsynth")


def test_a_byte_that_is_not_utf8_is_named_with_its_column(tmp_path: Path) -> None:
    path = tmp_path / "metadata.csv"
    path.write_bytes(b"image,edit_image,prompt\nt.png,s.png,caf\xe9\nt2.png,s.png,ok\n")
    assert 'line 2: "prompt" holds the byte 0xE9' in message(path)
    assert len(open_manifest(path, on_error="skip")) == 1


# musubi-tuner: JSON Lines with image_path, control_path[_n], caption; TOML


def test_musubi_lines_with_one_or_numbered_controls(tmp_path: Path) -> None:
    rows = [
        {"image_path": "t1.png", "control_path": "c1.png", "caption": "x"},
        {"image_path": "t2.png", "control_path_1": "b.png", "control_path_0": "a.png", "caption": "y"},
        {"image_path": "t3.png", "control_path_10": "k.png", "control_path_2": "c.png", "caption": "z"},
        {"image_path": "t4.png", "image_path_1": "t4b.png", "control_path": "c.png", "caption": "z"},
        {"image_path": "t5.png", "caption": "z"},
    ]
    table = open_manifest(lines(tmp_path / "any.jsonl", rows), on_error="skip")
    assert [s.source_names for s in table] == [("c1.png",), ("a.png", "b.png"), ("c.png", "k.png")]
    assert "musubi-tuner any.jsonl, 3 rows, 2 refused" in table.describe()
    assert "several targets" in table.refused[0].reason
    assert table.refused[1].reason == '"control_path" is missing'


def test_musubi_toml_with_lines_and_folders(tmp_path: Path) -> None:
    lines(tmp_path / "meta.jsonl", [{"image_path": "t1.png", "control_path": "c1.png", "caption": "x"}])
    for name in ("a.jpg", "a_1.png", "b.png"):
        save(tmp_path / "out" / name)
        written((tmp_path / "out" / name).with_suffix(".cap"), f"caption of {name}\n")
    for name in ("a.png", "a_1_0.png", "a_1_1.png", "b_0000.png", "b_0001.png", "b_0010.png"):
        save(tmp_path / "in" / name)
    toml = """
        [general]
        resolution = [960, 544]
        caption_extension = ".cap"
        [[datasets]]
        image_jsonl_file = "meta.jsonl"
        num_repeats = 3
        [[datasets]]
        image_directory = "out"
        control_directory = "in"
        fp_1f_target_index = 9
    """
    table = open_manifest(written(tmp_path / "dataset.toml", toml))
    assert plain(table) == [
        (["c1.png"], "x", "t1.png"),
        (["in/a.png"], "caption of a.jpg", "out/a.jpg"),
        (["in/a_1_0.png", "in/a_1_1.png"], "caption of a_1.png", "out/a_1.png"),
        (["in/b_0000.png", "in/b_0001.png", "in/b_0010.png"], "caption of b.png", "out/b.png"),
    ]
    assert table.weights.tolist() == [3, 1, 1, 1]
    assert 'musubi-tuner TOML, 4 rows; not used: "fp_1f_target_index"' in table.describe()


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[general]\n", "needs [[datasets]]"),
        ("[[datasets]]\nimage_directory = 'o'\ncontrol_directory = 'i'\n", "caption_extension is missing"),
        ("[[datasets]]\nvideo_directory = 'o'\n", "one of videos"),
        ("[[datasets]]\nimage_jsonl_file = 'none.jsonl'\n", "there is no such file"),
        ("[[datasets]]\nimage_directory = 'o'\ncontrol_directory = 'i'\ncaption_extension = '.txt'\n", "is not there"),
        ("[[datasets]\n", "dataset.toml"),
        ("[[datasets]]\nimage_jsonl_file = 'm.jsonl'\nnum_repeats = 0\n", "num_repeats is 0"),
    ],
)
def test_a_wrong_musubi_toml_is_refused(tmp_path: Path, toml: str, words: str) -> None:
    lines(tmp_path / "m.jsonl", [])
    assert words in message(written(tmp_path / "dataset.toml", toml), form="musubi")


def test_folders_outside_the_configurations_own_must_be_allowed(tmp_path: Path) -> None:
    for name in ("out/a.png", "in/a.png"):
        save(tmp_path / "data" / name)
    written(tmp_path / "data/out/a.txt", "x")
    toml = f"""
        [[datasets]]
        image_directory = "{tmp_path}/data/out"
        control_directory = "{tmp_path}/data/in"
        caption_extension = ".txt"
    """
    path = written(tmp_path / "jobs" / "dataset.toml", toml)
    assert "data.outside" in message(path)
    table = open_manifest(path, outside=[str(tmp_path / "data")])
    assert [file.read(1 << 20) for file in table[0].sources] == [(tmp_path / "data/in/a.png").read_bytes()]


# ai-toolkit: a target folder with captions, one to three control folders


def ai_toolkit_folders(folder: Path) -> None:
    for name in ("img1", "img01", "img010"):
        save(folder / "target" / f"{name}.png")
        written(folder / "target" / f"{name}.txt", f" edit {name} \n")
        save(folder / "control1" / f"{name}.jpg")
        save(folder / "control2" / f"{name}.webp")


def test_ai_toolkit_folders_are_matched_by_whole_stems(tmp_path: Path) -> None:
    ai_toolkit_folders(tmp_path)
    save(tmp_path / "control1" / "left_over.png")
    save(tmp_path / "target" / "img1.png.png")
    (tmp_path / "target" / "._img1.png").write_bytes(b"mac")
    (tmp_path / "target" / "folder.png").mkdir()
    table = open_manifest(tmp_path, on_error="skip")
    assert plain(table) == [
        ([f"control1/{n}.jpg", f"control2/{n}.webp"], f"edit {n}", f"target/{n}.png")
        for n in ("img01", "img010", "img1")
    ]
    assert "ai-toolkit folders, 3 rows, 1 refused" in table.describe()
    assert 'left alone: "folder.png"' in table.describe()
    assert "1 control pictures of" in table.describe()
    assert str(table.refused[0]).startswith('picture 4: "target/img1.png.png": "control1" has no picture of the stem')


def test_the_pairs_whose_stems_are_prefixes_of_one_another(tmp_path: Path) -> None:
    shutil.copytree(CASES / "pairs" / "prefix", tmp_path / "set")
    for name in ("img01", "img010"):
        written(tmp_path / "set/target" / f"{name}.txt", "x")
    text = message(tmp_path / "set")
    assert 'has no picture of the stem "img01"; the nearest name there is "img1.png"' in text
    assert 'has no picture of the stem "img010"' in text


def test_one_caption_for_two_pictures_of_one_stem_is_refused(tmp_path: Path) -> None:
    shutil.copytree(CASES / "pairs" / "same_stem", tmp_path / "target")
    save(tmp_path / "target" / "cat.png")
    save(tmp_path / "control" / "cat.png")
    assert '"cat.jpg" and "cat.png" have one stem' in message(tmp_path)


def test_a_target_without_caption_and_one_whose_caption_is_not_text(tmp_path: Path) -> None:
    ai_toolkit_folders(tmp_path)
    (tmp_path / "target" / "img1.txt").unlink()
    (tmp_path / "target" / "img01.txt").write_bytes(b"caf\xe9")
    written(tmp_path / "target" / "img010.txt", "\ufeff \n")
    text = message(tmp_path)
    assert 'there is no caption "img1.txt"' in text
    assert 'its caption "img01.txt" is not UTF-8 (byte 4)' in text
    assert '"instruction" is empty' in text


@pytest.mark.parametrize("whole", [True, False])
def test_ai_toolkit_configuration_of_a_job_and_of_a_data_set(tmp_path: Path, whole: bool) -> None:
    ai_toolkit_folders(tmp_path)
    (tmp_path / "target" / "img1.txt").unlink()
    entry = """
- folder_path: "target"
  control_path: ["control2", "control1"]
  default_caption: "[trigger] somehow"
  trigger_word: "vivid"
  caption_ext: "txt"
  caption_dropout_rate: 0.05
  resolution: [512, 768]
"""
    text = entry
    if whole:
        indented = entry.replace("\n", "\n      ")
        text = f"job: extension\nconfig:\n  process:\n    - type: 'diffusion_trainer'\n      datasets:{indented}\n"
    table = open_manifest(written(tmp_path / "job.yaml", text))
    assert plain(table)[2] == (["control2/img1.webp", "control1/img1.jpg"], "vivid somehow", "target/img1.png")
    assert 'ai-toolkit config, 3 rows; not used: "caption_dropout_rate"' in table.describe()


def test_more_control_folders_than_references_are_refused(tmp_path: Path) -> None:
    ai_toolkit_folders(tmp_path)
    assert "has 2 pictures; at most 1 are taken" in message(tmp_path, max_references=1)


def test_folders_of_pictures_hide_nothing(tmp_path: Path) -> None:
    """What is not read is told; two pictures for one place are refused, masks and numbered controls too."""
    for folder in ("target", "control", "mask"):
        for stem in "abc":
            save(tmp_path / folder / f"{stem}.png")
    for stem in "abc":
        written(tmp_path / "target" / f"{stem}.txt", "x")
    (tmp_path / "mask" / "b.png").rename(tmp_path / "mask" / "b_mask.png")
    save(tmp_path / "mask" / "c.jpg")
    save(tmp_path / "target" / "more" / "d.png")
    save(tmp_path / "source" / "a.png")
    save(tmp_path / "Control" / "a.png")
    table = open_manifest(tmp_path, on_error="skip")
    assert [s.target_name for s in table] == ["target/a.png", "target/b.png"]
    assert '"mask" has "c.jpg" and "c.png" for it' in table.refused[0].reason
    told = table.describe()
    for words in (
        'not used: "', '"source"', 'left alone: "more" in "target"', "2 targets of", "1 masks have no target, such as",
    ):  # fmt: skip
        assert words in told

    save(tmp_path / "control" / "a.jpg")
    save(tmp_path / "control" / "b_1.png")
    save(tmp_path / "control" / "b_01.png")
    save(tmp_path / "control" / "z_1.png")
    toml = "[[datasets]]\nimage_directory='target'\ncontrol_directory='control'\ncaption_extension='.txt'\n"
    table = open_manifest(written(tmp_path / "d.toml", toml), on_error="skip")
    assert [s.source_names for s in table] == [("control/c.png",)]
    assert '"a.jpg" and "a.png" for it, which are one reference' in table.refused[0].reason
    assert '"b_01.png" and "b_1.png" for it' in table.refused[1].reason
    assert "have no target" in table.describe()


# Hugging Face: imagefolder, Parquet


def test_imagefolder_lines_with_several_pictures_a_row(tmp_path: Path) -> None:
    rows = [
        {"file_name": "1.png", "source_file_names": ["a.png", "b.png"], "text": "x", "label": 3},
        {"file_name": "2.png", "source_file_names": ["c.png"], "text": "y", "label": 3},
    ]
    lines(tmp_path / "metadata.jsonl", rows)
    table = open_manifest(tmp_path)
    assert plain(table) == [(["a.png", "b.png"], "x", "1.png"), (["c.png"], "y", "2.png")]
    assert 'imagefolder metadata.jsonl, 2 rows; not used: "label"' in table.describe()


def test_imagefolder_csv_where_file_name_is_the_source(tmp_path: Path) -> None:
    text = "file_name,edited_image_file_name,edit_prompt\na.png,b.png,make it blue\n"
    table = open_manifest(written(tmp_path / "metadata.csv", text))
    assert plain(table) == [(["a.png"], "make it blue", "b.png")]
    assert "imagefolder metadata.csv, 1 row" in table.describe()


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    from PIL import Image

    Image.new("RGB", (16, 16), (number, 1, 2)).save(buffer, "PNG")
    return buffer.getvalue()


def embedded(*numbers: int | None) -> pa.Array:
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    values = [None if n is None else {"bytes": png(n), "path": f"{n}.png"} for n in numbers]
    return pa.array(values, kind)


def parquet(path: Path, **columns: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=2)
    return path


def test_parquet_with_embedded_pictures_over_several_files(tmp_path: Path) -> None:
    for part, start in ((0, 0), (1, 3)):
        numbers = range(start, start + 3)
        parquet(
            tmp_path / "data" / f"train-0000{part}-of-00002.parquet",
            original_image=embedded(*numbers), edited_image=embedded(*(n + 10 for n in numbers)),
            edit_prompt=[f"e{n}" for n in numbers], original_prompt=["p"] * 3,
        )  # fmt: skip
    table = open_manifest(tmp_path)
    assert 'Parquet, 6 rows; not used: "original_prompt"' in table.describe()
    first = "data/train-00000-of-00002.parquet"
    assert plain(table)[2] == ([f"{first}//2/original_image"], "e2", f"{first}//2/edited_image")
    assert plain(table)[3][0] == ["data/train-00001-of-00002.parquet//0/original_image"]
    assert table.where(5) == 'row 2 of "data/train-00001-of-00002.parquet"'
    assert plain(open_manifest(tmp_path / "data" / "train-*.parquet"))[2][1] == "e2"


def test_parquet_rows_without_a_picture_and_with_binary_or_named_ones(tmp_path: Path) -> None:
    path = parquet(
        tmp_path / "p.parquet", source=embedded(1, 2, None), target=[png(1), None, png(3)], instruction=["x", "y", "z"]
    )
    table = open_manifest(path, on_error="skip")
    assert plain(table) == [(["p.parquet//0/source"], "x", "p.parquet//0/target")]
    assert [str(r) for r in table.refused] == ['row 2: "target" is missing', 'row 3: "source" is missing']
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    named = pa.array([{"bytes": None, "path": "s.png"}], kind)
    path = parquet(tmp_path / "n.parquet", source=named, target=["t.png"], instruction=["x"], weight=[2.5])
    assert plain(open_manifest(path)) == [(["s.png"], "x", "t.png")]


def test_parquet_with_lists_of_references(tmp_path: Path) -> None:
    kind = pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))
    lists = [[{"bytes": png(n), "path": None} for n in range(count)] for count in (1, 3, 2)]
    path = parquet(
        tmp_path / "p.parquet", source_images=pa.array(lists, kind), target=embedded(7, 8, 9), prompt=["x", "y", "z"]
    )
    table = open_manifest(path)
    assert [len(s.source_names) for s in table] == [1, 3, 2]
    assert table[1].source_names[2] == "p.parquet//1/source_images/2"
    assert table[1].sources[2].read(1 << 20) == png(2)
    bare = pa.array([[png(4), png(5)]], pa.list_(pa.binary()))
    path = parquet(tmp_path / "b.parquet", source=bare, target=[png(1)], prompt=["x"])
    assert open_manifest(path)[0].sources[1].read(1 << 20) == png(5)


def test_columns_can_be_told_where_their_names_say_nothing(tmp_path: Path) -> None:
    path = parquet(tmp_path / "p.parquet", a=embedded(1), b=embedded(2), c=embedded(3), d=["x"], kind=["k"])
    text = message(path)
    assert 'its columns are "a", "b", "c", "d", "kind"' in text
    assert "data.columns" in text
    told = {"source": ["b", "a"], "target": "c", "instruction": "d", "category": "kind"}
    table = open_manifest(path, columns=told)
    assert plain(table) == [(["p.parquet//0/b", "p.parquet//0/a"], "x", "p.parquet//0/c")]
    assert table.categories == ("k",)
    assert 'data.columns names "e", and there is no such column' in message(path, columns={**told, "target": "e"})
    assert '"targt" is no key of ours; did you mean "target"?' in message(path, columns={**told, "targt": "c"})


def test_files_of_one_set_must_have_the_same_columns(tmp_path: Path) -> None:
    parquet(tmp_path / "1.parquet", source=embedded(1), target=embedded(1), instruction=["x"])
    parquet(tmp_path / "2.parquet", source=embedded(1), target=embedded(1), text=["x"])
    assert '2.parquet": it has no column "instruction"' in message(tmp_path)


def test_a_cut_parquet_file_is_named(tmp_path: Path) -> None:
    path = parquet(tmp_path / "1.parquet", source=embedded(1), target=embedded(1), instruction=["x"])
    path.write_bytes(path.read_bytes()[:-10])
    assert "no Parquet file that can be read" in message(path)


# WebDataset


def shard(path: Path, members: list[tuple[str, bytes | str | dict[str, Any]]]) -> Path:
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            raw = json.dumps(content).encode() if isinstance(content, dict) else content
            raw = raw.encode() if isinstance(raw, str) else raw
            info = tarfile.TarInfo(name)
            info.size = len(raw)
            archive.addfile(info, io.BytesIO(raw))
    return path


def sample_members(key: str, number: int) -> list[tuple[str, bytes | str | dict[str, Any]]]:
    return [
        (f"{key}.source_0.jpg", png(number)), (f"{key}.source_1.png", png(number + 1)),
        (f"{key}.target.png", png(number + 2)), (f"{key}.json", {"instruction": f"edit {number}", "score": 1}),
    ]  # fmt: skip


def test_webdataset_shards_with_columns_in_extensions_and_json(tmp_path: Path) -> None:
    shard(tmp_path / "s-000.tar", [("README", "x"), *sample_members("a/0001", 1), *sample_members("a/0002", 2)])
    shard(tmp_path / "s-001.tar", sample_members("0003", 3))
    for location in (tmp_path, tmp_path / "s-{000..001}.tar", tmp_path / "*.tar"):
        table = open_manifest(location)
        assert plain(table)[1] == (
            ["s-000.tar//a/0002.source_0.jpg", "s-000.tar//a/0002.source_1.png"],
            "edit 2",
            "s-000.tar//a/0002.target.png",
        )
        assert 'WebDataset, 3 rows; not used: "score"' in table.describe()
        assert table.where(3) == 'sample 1 of "s-001.tar"'
    assert "there is no such file" in message(tmp_path / "s-{000..002}.tar")


def test_a_later_row_may_have_more_references_than_the_first(tmp_path: Path) -> None:
    """None is lost: columns are those of each row, and a gap is refused."""
    rows = [
        {"file_name": "t.png", "input_file_name": "a.png", "text": "one"},
        {"file_name": "t.png", "input_file_name": "a.png", "input_2_file_name": "b.png", "text": "two", "odd": 1},
        {"file_name": "t.png", "input_1_file_name": "b.png", "input_2_file_name": "a.png", "text": "numbered"},
    ]
    folder = lines(tmp_path / "f" / "metadata.jsonl", rows).parent
    table = open_manifest(folder)
    assert [s.source_names for s in table] == [("a.png",), ("a.png", "b.png"), ("b.png", "a.png")]
    assert 'not used: "odd"' in table.describe()
    columns = ("input_1", "input_2", "after", "what")
    told = {"source": ["input_1"], "target": "after", "instruction": "what"}
    only = lines(tmp_path / "told.jsonl", [dict.fromkeys(columns, "a.png")])
    assert open_manifest(only, columns=told)[0].source_names == ("a.png",)

    def members(key: str, *columns: str) -> list[tuple[str, bytes | str | dict[str, Any]]]:
        return [(f"{key}.txt", key), *((f"{key}.{column}.png", png(1)) for column in columns)]

    several = [
        *members("1", "source_0", "target"), *members("2", "source_0", "source_1", "target"),
        *members("3", "source_1", "target"), *members("4", "source", "target"),
    ]  # fmt: skip
    table = open_manifest(shard(tmp_path / "s.tar", several), on_error="skip")
    assert [len(s.source_names) for s in table] == [1, 2, 1]
    assert '"source_0" is empty, but "source_1" is not' in table.refused[0].reason


def test_webdataset_with_plain_extensions(tmp_path: Path) -> None:
    path = shard(tmp_path / "s.tar", [("1.jpg", png(1)), ("1.control.jpg", png(2)), ("1.txt", "make it so\n")])
    assert plain(open_manifest(path)) == [(["s.tar//1.control.jpg"], "make it so", "s.tar//1.jpg")]


def test_wrong_samples_of_a_shard_are_refused_by_key(tmp_path: Path) -> None:
    members = [
        *sample_members("ok", 1), ("bad.target.png", png(1)), ("bad.source_0.png", png(1)), ("bad.json", "{"),
        ("no.target.png", png(1)), ("no.json", {"instruction": "x"}), *sample_members("ok", 5),
    ]  # fmt: skip
    text = message(shard(tmp_path / "s.tar", members))
    assert 'sample 2: "bad": it is not a whole JSON object' in text
    assert 'sample 3: "source_0" is missing' in text
    assert 'sample 4: "ok": its files do not stand one after another' in text


def test_a_cut_shard_is_named(tmp_path: Path) -> None:
    path = shard(tmp_path / "s.tar", sample_members("a", 1))
    path.write_bytes(path.read_bytes()[:2600])
    assert "s.tar" in message(path)


# what cannot be told


def test_a_folder_that_is_no_set_says_what_would_be_one(tmp_path: Path) -> None:
    lines(tmp_path / "train.jsonl", [{"source": "a", "target": "b", "instruction": "c"}])
    text = message(tmp_path)
    assert "no metadata.jsonl" in text
    assert 'name the file that is meant, such as "train.jsonl"' in text


def test_two_metadata_files_are_ambiguous(tmp_path: Path) -> None:
    written(tmp_path / "metadata.csv", "file_name\n")
    lines(tmp_path / "metadata.jsonl", [])
    assert "name the one that is meant" in message(tmp_path)


def test_a_compressed_file_is_refused_with_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "s.tar.gz"
    path.write_bytes(b"\x1f\x8b" + bytes(100))
    assert "unpack it" in message(path)


def test_lines_with_told_keys(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", [{"in": "a.png", "out": "b.png", "say": "x"}])
    assert 'unknown key "in"' in message(path)
    table = open_manifest(path, columns={"source": "in", "target": "out", "instruction": "say"})
    assert plain(table) == [(["a.png"], "x", "b.png")]


def test_columns_that_a_format_does_not_need_are_told(tmp_path: Path) -> None:
    path = lines(tmp_path / "x.jsonl", [{"source": "a.png", "target": "b.png", "instruction": "x"}])
    assert "data.columns is not used" in open_manifest(path, columns={"target": "b"}).describe()


def test_several_files_of_lines_are_one_set(tmp_path: Path) -> None:
    for part in range(3):
        rows = [{"source": f"{part}{i}.png", "target": "t.png", "instruction": "x"} for i in range(2)]
        lines(tmp_path / f"part-{part}.jsonl", [*rows, {"source": "bad"}])
    table = open_manifest(tmp_path / "part-*.jsonl", on_error="skip")
    assert [s.source_names[0] for s in table] == ["00.png", "01.png", "10.png", "11.png", "20.png", "21.png"]
    assert "JSONL in 3 files, 6 rows, 3 refused" in table.describe()
    assert str(table.refused[1]) == 'line 3 of "part-1.jsonl": "instruction" is missing'
    assert "no file has such a name" in message(tmp_path / "none-*.jsonl")
