"""A manifest as a table on disk: the same rows whoever makes the index, found again, taken apart, handed on."""

from __future__ import annotations

import json
import os
import pickle
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_edit_zero.edit_data.manifests import duplicates as duplicates_module
from qwen_edit_zero.edit_data.manifests import opening
from qwen_edit_zero.edit_data.manifests.duplicates import duplicates
from qwen_edit_zero.edit_data.manifests.opening import open_manifest
from qwen_edit_zero.edit_data.manifests.table import SampleTable
from qwen_edit_zero.errors import DataError, StorageError
from tests.edit_data.builders import row, write_manifest


def rows(count: int) -> list[dict[str, Any]]:
    return [row(i, 1 + i % 3, category=f"c{i % 3}", weight=1 + i % 2) for i in range(count)]


def opened(folder: Path, given: list[dict[str, Any]], **options: Any) -> SampleTable:
    return open_manifest(write_manifest(folder, given), index_folder=folder / "index", **options)


def test_a_table_gives_rows_and_columns_by_index(tmp_path: Path) -> None:
    table = opened(tmp_path, [*rows(9), row(9, split="test", mask="m.png", paraphrases=["y"], category=None)])
    assert len(table) == 10
    assert [s.id for s in table] == [f"a{i}" for i in range(10)]
    assert table[4].source_names == ("s4_0.png", "s4_1.png")
    assert table[-1] == table[9]
    assert (table[9].split, table[9].mask_name, table[9].paraphrases) == ("test", "m.png", ("y",))
    assert table[9].target.name == str(tmp_path / "t9.png")
    assert table.categories == ("c0", "c1", "c2", "")
    assert table.category_codes.tolist() == [0, 1, 2, 0, 1, 2, 0, 1, 2, 3]
    assert table.weights.tolist() == [1, 2, 1, 2, 1, 2, 1, 2, 1, 1]
    assert table.lines.tolist() == list(range(1, 11))
    with pytest.raises(IndexError):
        table[10]


def test_taking_keeps_the_order_given_and_can_be_repeated(tmp_path: Path) -> None:
    table = opened(tmp_path, rows(10))
    taken = table.take(np.array([7, 2, 2, 9]))
    assert [s.id for s in taken] == ["a7", "a2", "a2", "a9"]
    assert taken.lines.tolist() == [8, 3, 3, 10]
    assert taken.weights.tolist() == [2, 1, 1, 2]
    assert [s.id for s in taken.take(np.array([3, 0]))] == ["a9", "a7"]
    assert [s.id for s in table[:3]] == ["a0", "a1", "a2"]
    assert table.take(np.arange(10)).fingerprint == table.fingerprint
    assert len({table.fingerprint, taken.fingerprint, table[:3].fingerprint, table[:4].fingerprint}) == 4
    with pytest.raises(IndexError):
        table.take(np.array([10]))


def test_the_fingerprint_follows_rows_and_order_but_not_the_place(tmp_path: Path) -> None:
    def fingerprint(name: str, given: list[dict[str, Any]]) -> str:
        (tmp_path / name).mkdir()
        return opened(tmp_path / name, given).fingerprint

    same = fingerprint("a", rows(3))
    assert fingerprint("b", rows(3)) == same
    others = [
        rows(3)[::-1], rows(2), [*rows(2), row(2, 3, category="c2", weight=2)], [*rows(2), row(2, 3, category="other")],
        [*rows(2), row(2, 2, category="c2")],
    ]  # fmt: skip
    assert len({same, *(fingerprint(f"o{i}", given) for i, given in enumerate(others))}) == 6


def test_several_processes_make_the_same_index_as_one(tmp_path: Path) -> None:
    given = [
        *rows(200),
        {**row(5), "target": "other.png"},
        {"id": "x"},
        *[row(i, split="test") for i in range(200, 300)],
    ]
    one = opened(tmp_path, given, on_error="skip", workers=1)
    three = open_manifest(tmp_path / "data.jsonl", index_folder=tmp_path / "index3", on_error="skip", workers=3)
    assert len(list((tmp_path / "index3").glob("*/rows-*.bin"))) == 3, "three processes took part"
    assert three.fingerprint == one.fingerprint
    assert list(three) == list(one)
    assert list(map(str, three.refused)) == list(map(str, one.refused))
    assert [r.line for r in one.refused] == [201, 202]
    assert "line 6" in one.refused[0].reason
    assert three.refused_reasons == one.refused_reasons
    assert three.splits == one.splits == {"": 200, "test": 100}
    assert three.lines.tolist() == one.lines.tolist()


@pytest.mark.parametrize(("count", "workers"), [(10_050, 1), (10_050, 2), (20_100, 2)])
def test_absurdly_many_categories_are_refused_whoever_counts_them(tmp_path: Path, count: int, workers: int) -> None:
    """By this process, when parts are joined, and by another process."""
    given = [row(i, category=f"kind {i}") for i in range(count)]
    with pytest.raises(DataError, match='over 10,000 different values of "category"'):
        opened(tmp_path, given, workers=workers)


def test_an_index_is_made_once_for_the_same_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    build = opening.build_index
    monkeypatch.setattr(opening, "build_index", lambda *a, **k: made.append(1) or build(*a, **k))
    opened(tmp_path, rows(5))
    opened(tmp_path, rows(5))
    (tmp_path / "data.jsonl").rename(tmp_path / "moved.jsonl")
    open_manifest(tmp_path / "moved.jsonl", index_folder=tmp_path / "index")
    assert len(made) == 1
    opened(tmp_path, rows(5)[::-1])
    assert len(made) == 2, "other content"
    opened(tmp_path, rows(5)[::-1], max_references=4)
    assert len(made) == 3, "read by other rules"


def test_an_index_of_earlier_content_goes_when_nobody_has_used_it_for_a_month(tmp_path: Path) -> None:
    first, second = Path(opened(tmp_path, rows(1)).index_folder), Path(opened(tmp_path, rows(2)).index_folder)
    month = time.time() - 31 * 24 * 3600
    os.utime(first / "header.json", (month, month))
    os.utime(second / "header.json", (month, month))
    opened(tmp_path, rows(2))
    opened(tmp_path, rows(3))
    assert not first.exists()
    assert second.exists(), "it was opened a moment ago"


@pytest.mark.parametrize("name", ["header.json", "rows-000.bin", "line.bin"])
def test_a_damaged_index_is_made_again(tmp_path: Path, name: str) -> None:
    table = opened(tmp_path, rows(5))
    before = list(table)
    path = Path(table.index_folder) / name
    del table
    path.write_bytes(path.read_bytes()[:-3])
    assert list(opened(tmp_path, rows(5))) == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("category", 1 << 30),
        ("category", -1),
        ("category", 0),
        ("split", 9),
        ("weight", float("nan")),
        ("length", 1 << 31),
    ],
)
def test_an_index_with_values_that_cannot_be_is_made_again(tmp_path: Path, name: str, value: float) -> None:
    given = [row(i, category="ab"[i % 2]) for i in range(6)]
    table = opened(tmp_path, given)
    path = Path(table.index_folder) / f"{name}.bin"
    sound = path.read_bytes()
    column = np.fromfile(path, {"weight": "<f4", "length": "<u4"}.get(name, "<i4"))
    column[3] = value
    column.tofile(path)
    del table
    assert [s.category for s in opened(tmp_path, given)] == ["a", "b"] * 3
    assert path.read_bytes() == sound


def test_many_open_one_manifest_at_once(tmp_path: Path) -> None:
    path = write_manifest(tmp_path, rows(500))
    found: list[str] = []

    def work() -> None:
        table = open_manifest(path, index_folder=tmp_path / "index")
        found.append(f"{table.fingerprint} {len(list(table))}")

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len(set(found)) == 1
    assert [p.name for p in (tmp_path / "index").iterdir() if p.name != "unfinished"] == [
        Path(open_manifest(path, index_folder=tmp_path / "index").index_folder).name
    ]
    assert not list((tmp_path / "index" / "unfinished").iterdir())


def test_only_rank_0_reads_the_manifest_and_all_tell_its_mistakes(tmp_path: Path) -> None:
    told: list[Any] = []
    path = write_manifest(tmp_path, rows(5))

    def say(value: Any) -> Any:
        told.append(value)
        return value

    zero = open_manifest(path, index_folder=tmp_path / "index", from_rank_0=say)
    path.write_text("gone")
    one = open_manifest(path, index_folder=tmp_path / "index", rank=1, from_rank_0=lambda _: told[0])
    assert list(one) == list(zero)
    errors = []
    for rank, give in ((0, say), (1, lambda _: told[1])):
        with pytest.raises(DataError) as error:
            open_manifest(tmp_path / "none.jsonl", index_folder=tmp_path / "index", rank=rank, from_rank_0=give)
        errors.append(str(error.value))
    assert errors[0] == errors[1]
    assert "there is no such file" in errors[0]


def test_a_rank_that_does_not_see_the_index_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opening, "_VISIBLE_SECONDS", 0.1)
    with pytest.raises(DataError, match=r"rank 3 does not see .*data\.cache_dir"):
        open_manifest(
            write_manifest(tmp_path, rows(1)),
            index_folder=tmp_path,
            rank=3,
            from_rank_0=lambda _: ("", "/nowhere/x", "/"),
        )


def test_a_table_can_be_pickled_without_its_rows(tmp_path: Path) -> None:
    table = opened(tmp_path, rows(1000))
    assert len(pickle.dumps(table)) < 1000
    taken = table.take(np.array([3, 1]))
    assert [s.id for s in pickle.loads(pickle.dumps(taken))] == ["a3", "a1"]


def test_a_split_chooses_rows_and_rows_without_one_are_for_training(tmp_path: Path) -> None:
    given = [row(0), row(1, split="train"), row(2, split="test"), row(3, split="test")]
    assert [s.id for s in opened(tmp_path, given, split="train")] == ["a0", "a1"]
    assert [s.id for s in opened(tmp_path, given, split="test")] == ["a2", "a3"]
    assert len(opened(tmp_path, given)) == 4
    with pytest.raises(DataError, match=r'no row is of split "tests"; did you mean "test"\?.*test 2'):
        opened(tmp_path, given, split="tests")


def test_refused_rows_are_counted_by_reason_and_kept_on_disk(tmp_path: Path) -> None:
    given = [row(0), *[row(i, weight=-i) for i in range(1, 40)], {**row(40), "targt": "x"}]
    table = opened(tmp_path, given, on_error="skip")
    assert len(table) == 1
    assert len(table.refused) == 40
    assert table.refused[-1].line == 41
    assert 'did you mean "target"' in str(table.refused[39])
    assert [r.line for r in table.refused[2:4]] == [4, 5]
    counts = list(table.refused_reasons.values())
    assert counts == [39, 1], "numbers and names do not make reasons different"
    with pytest.raises(DataError, match=r"40 rows cannot be used(?s:.*)and 30 more(?s:.*)data\.on_error=skip"):
        opened(tmp_path, given)


def test_a_table_describes_itself_in_one_line(tmp_path: Path) -> None:
    given = [*rows(1200), row(1200, split="test"), row(0)]
    table = opened(tmp_path, given, on_error="skip", split="train")
    path = tmp_path / "data.jsonl"
    assert table.describe() == (
        f'manifest "{path}": JSONL, 1,201 rows, 1 refused, 1,200 taken (splits: none 1,200, test 1)'
    )


def test_pictures_need_not_be_there_yet(tmp_path: Path) -> None:
    assert len(opened(tmp_path, rows(3))) == 3


def test_a_manifest_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_manifest(tmp_path, rows(5))
    build = opening.build_index

    def build_and_append(*args: Any, **options: Any) -> Path:
        made = build(*args, **options)
        with path.open("a") as file:
            file.write(json.dumps(row(6)) + "\n")
        return made

    monkeypatch.setattr(opening, "build_index", build_and_append)
    with pytest.raises(DataError, match="changed while it was read"):
        open_manifest(path, index_folder=tmp_path / "index")


def test_an_index_that_cannot_be_written_is_the_stores_fault(tmp_path: Path) -> None:
    (tmp_path / "index").write_text("a file where the folder should be")
    with pytest.raises(StorageError, match=r"cannot be written.*data\.cache_dir"):
        opened(tmp_path, rows(1))


def test_without_a_folder_the_index_goes_with_the_table(tmp_path: Path) -> None:
    table = open_manifest(write_manifest(tmp_path, rows(3)))
    folder = table.index_folder
    assert len(list(table)) == 3
    del table
    assert not os.path.exists(folder)


@pytest.mark.parametrize("in_a_pass", [1 << 21, 8])
def test_duplicates_are_found_exactly_in_any_number_of_passes(monkeypatch: pytest.MonkeyPatch, in_a_pass: int) -> None:
    monkeypatch.setattr(duplicates_module, "_IN_A_PASS", in_a_pass)
    random = np.random.default_rng(0)
    ids = [f"id{n}" for n in random.integers(0, 60, 100)]

    def found(hash_of: Callable[[str], int]) -> set[tuple[int, int]]:
        hashes = np.array([hash_of(id_) for id_ in ids], np.uint64)
        return set(duplicates(hashes, ids.__getitem__))

    expected = {(i, ids.index(id_)) for i, id_ in enumerate(ids) if ids.index(id_) != i}
    assert found(lambda id_: int(id_[2:]) * 0x4321_8765_1234_5678 % 2**64) == expected
    assert found(lambda id_: int(id_[2:]) % 7 << 61) == expected, "ids decide, not their hashes"
    assert not list(duplicates(np.empty(0, np.uint64), ids.__getitem__))
