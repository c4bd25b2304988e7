"""Notes: found again by any process, the newest counts, whatever was cut off, in bounded memory."""

from __future__ import annotations

import multiprocessing
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qwen_edit_zero.edit_data.cache import notes
from qwen_edit_zero.edit_data.cache.notes import Notes
from qwen_edit_zero.edit_data.cache.ranks import Ranks
from qwen_edit_zero.edit_data.cache.sorted_table import as_keys

RECORD = np.dtype([("value", "<i4"), ("more", np.uint8, 3)])


def keys_of(numbers: range) -> np.ndarray:
    return np.stack([np.frombuffer(np.random.default_rng(i).bytes(16), np.uint8) for i in numbers])


def add(folder: Path, numbers: range, offset: int = 0) -> None:
    records = np.zeros(len(numbers), RECORD)
    records["value"] = np.array(numbers) + offset
    with Notes(folder, RECORD, Ranks()) as found:
        found.add(keys_of(numbers), records)


def values(folder: Path, numbers: range) -> list[int | None]:
    with Notes(folder, RECORD, Ranks()) as found:
        there, records = found.look_up(as_keys(keys_of(numbers)))
    return [int(r["value"]) if known else None for known, r in zip(there, records, strict=True)]


@pytest.mark.parametrize("in_a_part", [1 << 20, 64, 1])
def test_what_was_noted_is_found_and_the_newest_counts(
    in_a_part: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notes, "_IN_A_PART", in_a_part)
    monkeypatch.setattr(notes, "_SCANNED", 50)
    add(tmp_path, range(200))
    assert values(tmp_path, range(210)) == [*range(200), *[None] * 10]
    add(tmp_path, range(150, 300), offset=1000)
    add(tmp_path, range(290, 310), offset=2000)
    expected = [*range(150), *range(1150, 1290), *range(2290, 2310)]
    assert values(tmp_path, range(310)) == expected
    assert list((tmp_path / "new").iterdir()) == []
    assert values(tmp_path, range(310)) == expected


def test_a_cut_record_is_left_out(tmp_path: Path) -> None:
    add(tmp_path, range(10))
    (path,) = (tmp_path / "new").iterdir()
    os.truncate(path, path.stat().st_size - 1)
    assert values(tmp_path, range(10)) == [*range(9), None]


def test_what_a_living_process_writes_is_left_to_it(tmp_path: Path) -> None:
    with Notes(tmp_path, RECORD, Ranks()) as writing:
        writing.add(keys_of(range(5)), np.zeros(5, RECORD))
        assert values(tmp_path, range(5)) == [None] * 5
    assert values(tmp_path, range(5)) == [0] * 5


def test_of_two_processes_that_start_at_once_none_loses_what_the_other_takes_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as ending_together:  # so that none takes in what another has written
        for i in range(4):
            found = ending_together.enter_context(Notes(tmp_path, RECORD, Ranks()))
            found.add(keys_of(range(i, i + 1)), np.zeros(1, RECORD))
    context = multiprocessing.get_context("fork")
    half, rest, done = (
        context.Event(),
        context.Event(),
        context.Event(),
    )  # the first has taken half, the second the rest
    real_merge, real_look, looked_at = Notes._merge, notes.is_abandoned, []

    def merge_late(self: Notes, *arguments: Any) -> Path:
        rest.set()
        done.wait(1)
        return real_merge(self, *arguments)

    def second() -> None:
        half.wait()
        monkeypatch.setattr(Notes, "_merge", merge_late)
        Notes(tmp_path, RECORD, Ranks())

    def look_late(fd: int, path: Path) -> bool:
        looked_at.append(path)
        if len(looked_at) == 3:
            half.set()
            rest.wait(0.5)
        return real_look(fd, path)

    process = context.Process(target=second)
    process.start()
    monkeypatch.setattr(notes, "is_abandoned", look_late)
    Notes(tmp_path, RECORD, Ranks())
    done.set()
    process.join()
    assert process.exitcode == 0
    monkeypatch.undo()
    assert values(tmp_path, range(4)) == [0] * 4


def test_a_folder_that_cannot_be_written_is_a_memory_of_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    add(tmp_path / "file", range(5))
    assert values(tmp_path / "file", range(5)) == [None] * 5
