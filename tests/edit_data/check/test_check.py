"""A whole check: what is found, what is remembered, what is written, and how it ends."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from qwen_edit_zero.edit_data.cache.needs import Making
from qwen_edit_zero.edit_data.check.columns import ACCEPTED, RowColumns
from qwen_edit_zero.edit_data.check.duplicates import same_samples, same_targets, targets_that_are_sources, usable_rows
from qwen_edit_zero.edit_data.manifests.opening import open_manifest
from qwen_edit_zero.edit_data.pictures.prepare import Areas
from qwen_edit_zero.errors import RunError
from qwen_edit_zero.settings.models import AugmentSettings
from tests.edit_data.builders import row, save, save_pictures, write_manifest
from tests.edit_data.cache.filling import AREAS
from tests.edit_data.check.checked import check, make_rules, scene, tokens_of

LARGE = Making(Areas(256 * 256, 128 * 128))


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """A folder with a scene in many states."""
    image = scene(1, 640, 512)
    image.save(tmp_path / "scene.png")
    image.save(tmp_path / "again.jpg", quality=90)
    image.resize((320, 256), Image.Resampling.LANCZOS).save(tmp_path / "half.png")
    image.resize((300, 240)).resize((640, 512), Image.Resampling.BICUBIC).save(tmp_path / "enlarged.png")
    image.crop((0, 0, 632, 512)).save(tmp_path / "cut.png")
    image.crop((0, 0, 512, 512)).save(tmp_path / "square.png")
    image.resize((2560, 2048)).save(tmp_path / "huge.jpg")
    larger = scene(1, 660, 528)
    larger.crop((0, 0, 640, 512)).save(tmp_path / "left.png")
    edited = larger.crop((10, 8, 650, 520))
    edited.paste("orange", (50, 50, 200, 200))
    edited.save(tmp_path / "moved.png")
    changed = image.copy()
    changed.paste("orange", (50, 50, 200, 200))
    changed.save(tmp_path / "changed.png")
    scene(2, 96, 64).save(tmp_path / "tiny.png")
    Image.new("RGB", (640, 512), "#808080").save(tmp_path / "plain.png")
    Image.new("L", (640, 512)).save(tmp_path / "black.png")
    Image.new("L", (640, 512), 255).save(tmp_path / "white.png")
    return tmp_path


KINDS: dict[str, tuple[dict[str, Any], set[str]]] = {
    "nothing odd": ({}, set()),
    "the same file": ({"target": "scene.png"}, {"no-change"}),
    "the same but for compression": ({"target": "again.jpg"}, {"no-change"}),
    "the same, smaller": ({"target": "half.png"}, {"no-change"}),
    "shifted": ({"source": "left.png", "target": "moved.png"}, {"moved"}),
    "cut by a few pixels": ({"target": "cut.png"}, {"nearly-aligned"}),
    "another aspect": ({"target": "square.png"}, {"other-aspect"}),
    "another aspect among several": ({"source": ["square.png", "scene.png"]}, set()),
    "very large": ({"source": "huge.jpg"}, {"other-scale"}),
    "enlarged": ({"source": "changed.png", "target": "enlarged.png"}, {"soft"}),
    "tiny": ({"source": "tiny.png", "target": "tiny.png"}, {"small", "no-change"}),
    "of one colour": ({"target": "plain.png"}, {"blank"}),
    "a black mask": ({"mask": "black.png"}, {"empty-mask"}),
    "a white mask": ({"mask": "white.png"}, set()),
    "no words": ({"instruction": "... 12 !"}, {"no-words"}),
    "found by the filter": ({"instruction": "make her nude"}, {"flagged"}),
}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_odd_is_told_and_nothing_else(name: str, pictures: Path) -> None:
    changes, kinds = KINDS[name]
    values = {"id": "a", "source": "scene.png", "target": "changed.png", "instruction": "make it orange", **changes}
    rules = partial(make_rules, LARGE, "flag")
    found = check(write_manifest(pictures, [values]), pictures / "out", making=LARGE, new_rules=rules)
    assert found.kinds("a") == kinds
    assert found.accepted == ["a"], "it is trained on all the same"
    assert found.checked.exit_status(strict=False) == bool(kinds)
    assert found.counts().get("full-mask") == (1 if name == "a white mask" else None)


def test_a_shift_is_told_in_pixels_of_the_target(pictures: Path) -> None:
    manifest = write_manifest(pictures, [{"source": "left.png", "target": "moved.png", "instruction": "x"}])
    (finding,) = check(manifest, pictures / "out", making=LARGE).findings
    assert re.search(r"lies (9\.[89]|10\.[012]) pixels to the left and (7\.[89]|8\.[012]) pixels up", finding["reason"])


def test_without_a_tokenizer_long_instructions_are_estimated(pictures: Path) -> None:
    rows = [
        {"id": n, "source": "scene.png", "target": "changed.png", "instruction": text}
        for n, text in (("zh", "改" * 1100), ("en", "word " * 1100), ("fine", "word " * 700))
    ]
    found = check(
        write_manifest(pictures, rows), pictures / "out", new_rules=partial(make_rules, LARGE, check_text=None)
    )
    assert {f["id"] for f in found.findings if f["kind"] == "long"} == {"zh", "en"}


def test_what_augmentation_leaves_alone_is_counted(pictures: Path) -> None:
    rows = [
        {"id": "left", "source": "scene.png", "target": "changed.png", "instruction": "the left one"},
        {"id": "square", "source": "square.png", "target": "changed.png", "instruction": "red"},
    ]
    making = Making(LARGE.areas, augment=AugmentSettings(flip=True, crop=0.9), variants=2)
    counts = check(write_manifest(pictures, rows), pictures / "out", making=making).counts()
    assert (counts["never-mirrored"], counts["never-cropped"]) == (1, 1)


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    rows = [row(i, references=1 + i % 3) for i in range(40)]
    save_pictures(tmp_path, rows)
    rows.append({**rows[3], "id": "twin"})
    rows.append({**rows[4], "id": "other", "target": "t5.png"})
    rows.append({**rows[6], "id": "swapped", "source": rows[5]["source"][::-1]})
    rows.append({"id": "back", "source": "t7.png", "target": "s7_0.png", "instruction": "undo"})
    rows.append({"id": "gone", "source": "t77.png", "target": "s7_0.png", "instruction": "x"})
    (tmp_path / "t9.png").write_bytes(b"no picture")
    return write_manifest(tmp_path, rows)


def test_copies_are_found_by_content(manifest: Path, tmp_path: Path) -> None:
    (tmp_path / "copied.png").write_bytes((tmp_path / "t11.png").read_bytes())
    with manifest.open("a", encoding="utf-8") as file:
        file.write(json.dumps({**row(11, 3), "id": "copy", "target": "copied.png"}) + "\n")
    found = check(manifest, tmp_path / "out")
    by_kind = {
        kind: [f["id"] for f in found.findings if f["kind"] == kind] for kind in ("twice", "contradiction", "missing")
    }
    assert by_kind == {"twice": ["twin", "copy"], "contradiction": ["other"], "missing": ["gone"]}
    assert "line 4 (id a3)" in next(f["reason"] for f in found.findings if (f["id"], f["kind"]) == ("twin", "twice"))
    assert found.counts()["same-target"] == 4  # twin, other, swapped, copy
    assert found.counts()["target-is-source"] == 2  # a7 and back


def test_the_clean_manifest_reads_as_the_accepted_rows(manifest: Path, tmp_path: Path) -> None:
    found = check(manifest, tmp_path / "elsewhere" / "out")
    clean = open_manifest(tmp_path / "elsewhere/out/clean.jsonl", outside=found.checked.outside)
    whole = {sample.id: sample for sample in open_manifest(manifest)}
    assert [sample.id for sample in clean] == [id_ for id_ in whole if id_ not in ("gone", "a9")]
    for sample in clean:
        assert sample.instruction == whole[sample.id].instruction
        assert sample.target.read(1 << 20) == whole[sample.id].target.read(1 << 20)
        assert [s.read(1 << 20) for s in sample.sources] == [s.read(1 << 20) for s in whole[sample.id].sources]
    beside = check(manifest, tmp_path, cache=tmp_path / "elsewhere/out/cache")
    assert beside.checked.outside == []
    assert len(open_manifest(tmp_path / "clean.jsonl")) == len(clean)


def test_pictures_in_archives_stay_there(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    cells = []
    for seed in range(3):
        scene(seed, 64, 64).save(tmp_path / "one.png")
        cells.append({"bytes": (tmp_path / "one.png").read_bytes(), "path": None})
    broken = {"bytes": cells[2]["bytes"][:-60], "path": None}
    columns = {"source": cells, "target": [cells[1], cells[0], broken], "instruction": ["a", "b", "c"]}
    (tmp_path / "set").mkdir()
    pq.write_table(pa.table(columns), tmp_path / "set/part.parquet")
    found = check(tmp_path / "set/part.parquet", tmp_path / "out")
    assert {name: found.counts().get(name) for name in ("picture", "target-is-source")} == {
        "picture": 1, "target-is-source": 2,
    }  # fmt: skip
    clean = open_manifest(tmp_path / "out/clean.jsonl", outside=found.checked.outside)
    assert [sample.target.read(1 << 20) for sample in clean] == [cells[1]["bytes"], cells[0]["bytes"]]
    assert [sample.id for sample in clean] == found.accepted


def test_strict_leaves_out_what_is_warned_of(manifest: Path, tmp_path: Path) -> None:
    loose, strict = check(manifest, tmp_path / "out"), check(manifest, tmp_path / "strict", strict=True)
    assert set(loose.accepted) - set(strict.accepted) == {"twin", "other"} | {
        f["id"] for f in loose.findings if f["level"] == "warning"
    }
    assert (loose.checked.exit_status(strict=False), strict.checked.exit_status(strict=True)) == (1, 2)


def test_nothing_usable_is_status_2(tmp_path: Path) -> None:
    save(tmp_path / "a.png")
    manifest = write_manifest(tmp_path, [{"source": "a.png", "target": "b.png", "instruction": "x"}])
    found = check(manifest, tmp_path / "out")
    assert found.checked.exit_status(strict=False) == 2
    assert (found.clean, found.counts()) == ([], {"missing": 1})


def test_known_pictures_are_not_decoded_again(manifest: Path, tmp_path: Path) -> None:
    first = check(manifest, tmp_path / "1", cache=tmp_path / "cache")
    again = check(manifest, tmp_path / "2", cache=tmp_path / "cache")
    assert first.checked.decoded > 90
    assert again.checked.decoded == 0
    assert (again.findings, again.clean, again.counts()) == (first.findings, first.clean, first.counts())
    save(tmp_path / "t1.png", (96, 64))
    changed = check(manifest, tmp_path / "3", cache=tmp_path / "cache")
    assert changed.checked.decoded == 3, "the target, and the two that it is compared with"


def test_processes_find_what_one_finds(manifest: Path, tmp_path: Path) -> None:
    one, two = check(manifest, tmp_path / "1"), check(manifest, tmp_path / "2", workers=2)
    assert (one.findings, one.clean, one.counts()) == (two.findings, two.clean, two.counts())
    assert np.array_equal(one.checked.summary.lengths.counts, two.checked.summary.lengths.counts)
    assert one.checked.summary.buckets == two.checked.summary.buckets
    assert multiprocessing.active_children() == []


def slow(text: str) -> int:
    time.sleep(0.02)
    return tokens_of(text)


def crashing(text: str) -> int:
    if "17" in text:
        os.kill(os.getpid(), signal.SIGSEGV)
    return tokens_of(text)


def failing(text: str) -> int:
    raise RunError("the classifier fails")


def test_a_row_that_ends_its_process_is_refused_alone(manifest: Path, tmp_path: Path) -> None:
    found = check(
        manifest, tmp_path / "out", workers=1, new_rules=partial(make_rules, Making(AREAS), check_text=crashing)
    )
    whole = check(manifest, tmp_path / "whole")
    assert [id_ for id_ in whole.accepted if id_ != "a17"] == found.accepted
    (reason,) = [f["reason"] for f in found.findings if f["id"] == "a17"]
    assert "SIGSEGV" in reason


def test_what_ends_a_run_ends_a_check(manifest: Path, tmp_path: Path) -> None:
    with pytest.raises(RunError, match="the classifier fails"):
        check(manifest, tmp_path / "out", workers=2, new_rules=partial(make_rules, Making(AREAS), check_text=failing))
    assert multiprocessing.active_children() == []
    assert not (tmp_path / "out/findings.jsonl").exists()


def _in_a_process(manifest: Path, out: Path, cache: Path) -> None:
    check(manifest, out, cache=cache, workers=2, new_rules=partial(make_rules, Making(AREAS), check_text=slow))


def test_a_killed_check_goes_on_where_it_was(tmp_path: Path) -> None:
    rows = [row(i) for i in range(160)]
    save_pictures(tmp_path, rows)
    manifest = write_manifest(tmp_path, rows)
    process = multiprocessing.get_context("spawn").Process(
        target=_in_a_process, args=(manifest, tmp_path / "1", tmp_path / "cache")
    )
    process.start()
    deadline = time.monotonic() + 60
    while not _noted(tmp_path / "cache") and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.join()
    assert not (tmp_path / "1/clean.jsonl").exists()
    noted = -1
    while noted != (noted := _noted(tmp_path / "cache")):  # its processes end by themselves
        time.sleep(1)
    again = check(manifest, tmp_path / "2", cache=tmp_path / "cache")
    fresh = check(manifest, tmp_path / "3")
    assert 0 < again.checked.decoded < fresh.checked.decoded == 320
    assert (again.findings, again.clean) == (fresh.findings, fresh.clean)


def _noted(cache: Path) -> int:
    return sum(path.stat().st_size for path in cache.glob("check/looks/new/*"))


def test_duplicates_in_columns_are_those_of_a_plain_search(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    columns = RowColumns(tmp_path, 400, 2, new=True)
    pool = random.integers(0, 256, (40, 16), np.uint8)
    columns.state[:] = np.where(random.random(400) < 0.1, 3, ACCEPTED)
    columns.digests[:] = pool[random.integers(0, 40, (400, 4))]
    columns.digests[:, 2][random.random(400) < 0.5] = 0
    columns.digests[:, 3][random.random(400) < 0.8] = 0
    columns.words[:] = random.integers(0, 3, 400)
    rows = usable_rows(columns)

    shown = {int(r): columns.digests[r, 1:3].tobytes() + bytes([int(columns.words[r])]) for r in rows}
    made = {int(r): columns.digests[r, [0, 3]].tobytes() for r in rows}
    expected = []
    for r in shown:
        first = next(q for q in shown if shown[q] == shown[r])
        if first < r:
            expected.append((r, first, made[first] == made[r]))
    assert sorted(same_samples(columns, rows)) == sorted(expected)
    targets = {int(r): columns.digests[r, 0].tobytes() for r in rows}
    firsts = {r: next(q for q in targets if targets[q] == targets[r]) for r in targets}
    assert sorted(same_targets(columns, rows)) == sorted((r, f) for r, f in firsts.items() if f != r)
    sources = {int(r): {d.tobytes() for d in columns.digests[r, 1:3] if d.any()} for r in rows}
    both = [r for r in targets if any(targets[r] in sources[q] for q in sources if q != r)]
    assert targets_that_are_sources(columns, rows).tolist() == both
