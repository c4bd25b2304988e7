"""What ships with the package: demo data, font, licences, and their size."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from fontTools.ttLib import TTFont
from PIL import Image

from qwen_edit_zero.assets import asset_path, cjk_font_path
from tests.tiny.demo import Triplet, read

TRAIN, VALIDATION = read("train"), read("validation")


def photos(triplets: list[Triplet]) -> set[str]:
    """Names of the photographs that appear undisguised, from the files' names: `tra-brook-s3.jpg` -> brook."""
    files = {p.name for t in triplets for p in (*t.sources, t.target)}
    return {m.group(1) for f in files if (m := re.fullmatch(r"...-([a-z]+)-[swt]\d\.jpg", f))}


def test_the_shipped_assets_stay_under_five_megabytes() -> None:
    assert sum(f.stat().st_size for f in asset_path(".").rglob("*") if f.is_file() and f.suffix != ".pyc") < 5_000_000


def test_every_category_has_samples_to_learn_from_and_to_judge_by() -> None:
    train, validation = (Counter(t.category for t in triplets) for triplets in (TRAIN, VALIDATION))
    expected = {"recolour", "add_text", "remove", "replace_background", "style", "geometry", "compose"}
    assert set(train) == set(validation) == expected
    assert min(train.values()) >= 40
    assert min(validation.values()) >= 6
    ids = [t.id for t in TRAIN + VALIDATION]
    assert len(set(ids)) == len(ids)


def test_validation_shows_photographs_that_training_never_sees() -> None:
    assert photos(TRAIN)
    assert photos(VALIDATION)
    assert not photos(TRAIN) & photos(VALIDATION)
    files = [{p for t in split for p in (*t.sources, t.target)} for split in (TRAIN, VALIDATION)]
    assert not files[0] & files[1]


def test_no_picture_is_shipped_that_no_sample_uses_and_none_is_missing() -> None:
    used = {p for t in TRAIN + VALIDATION for p in (*t.sources, t.target)}
    assert used == set(asset_path("demo/images").iterdir())


def test_training_buckets_fill_batches_of_sixteen() -> None:
    def size(path: Path) -> tuple[int, int]:
        with Image.open(path) as picture:
            assert picture.width % 32 == picture.height % 32 == 0
            return picture.size

    buckets = Counter((size(t.target), tuple(size(s) for s in t.sources)) for t in TRAIN)
    assert {len(references) for _, references in buckets} == {1, 2, 3}
    assert len({target for target, _ in buckets}) >= 3
    assert all(count % 16 == 0 for count in buckets.values()), buckets


def test_instructions_are_chinese_english_and_mixed_in_every_category() -> None:
    for category in {t.category for t in TRAIN}:
        kinds = {
            (bool(re.search(r"[一-鿿]", text)), bool(re.search(r"[a-z]{4}", text)))
            for text in (re.sub(r'[“"].*?[”"]', "", t.instruction) for t in TRAIN if t.category == category)
        }
        assert kinds >= {(True, False), (False, True), (True, True)}, (category, kinds)


@pytest.mark.parametrize("triplet", [t for t in TRAIN if t.category in {"remove", "add_text"}][::9], ids=lambda t: t.id)
def test_target_and_reference_agree_where_nothing_was_edited(triplet: Triplet) -> None:
    a, b = (np.asarray(Image.open(p).convert("RGB"), dtype=float) for p in (triplet.sources[0], triplet.target))
    difference = np.abs(a - b).max(axis=2)
    assert np.median(difference) <= 8  # JPEG's own error
    assert (difference > 40).mean() > 0.05  # the edit


def test_the_font_has_every_character_of_the_instructions() -> None:
    known = TTFont(cjk_font_path()).getBestCmap()
    used = {c for t in TRAIN + VALIDATION for c in t.instruction}
    assert used <= {chr(c) for c in known}
    assert "龙" in map(chr, known)  # and others: GB2312 level 1


def test_every_photograph_has_a_free_licence() -> None:
    rows = [line.split(" | ") for line in asset_path("demo/LICENSES.md").read_text("utf-8").splitlines() if "`" in line]
    licences = {cells[0].removeprefix("| "): cells[3] for cells in rows if len(cells) == 5}
    assert photos(TRAIN) | photos(VALIDATION) <= set(licences)
    assert set(licences.values()) <= {"public domain", "CC0-1.0", "CC-BY-2.0", "CC-BY-4.0"}


def test_a_missing_asset_is_named() -> None:
    with pytest.raises(FileNotFoundError, match=r"nothing\.txt is missing"):
        asset_path("nothing.txt")
