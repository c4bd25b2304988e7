"""Chance: one draw a sample and variant, the same wherever and whenever it is made."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from qwen_edit_zero.edit_data.pictures.draws import PLAIN, Draw, draw_for, names_a_side, variant_for
from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.load import load_settings
from qwen_edit_zero.settings.models import AugmentSettings

EVERYTHING = AugmentSettings(flip=True, crop=0.8, colour=0.1)


def test_draws_are_those_of_earlier_versions() -> None:
    """Pinned: other values would silently make every augmented entry of a cache anew, and change resumed runs."""
    assert [draw_for(EVERYTHING, seed=7, sample_id="猫-1", variant=v).key() for v in range(4)] == [
        "plain",
        "crop 9757 1342 6284, flip, tone 10426 9711",
        "crop 8653 7221 3961, flip, tone 10582 9007",
        "crop 9291 8224 1306, tone 9808 10475",
    ]
    drawn = [variant_for(seed=7, sample_id="猫-1", epoch=e, draw=0, variants=4) for e in range(12)]
    assert drawn == [2, 1, 3, 1, 3, 3, 2, 0, 1, 0, 2, 2]


def test_the_first_variant_and_no_augmentation_are_plain() -> None:
    assert draw_for(EVERYTHING, seed=1, sample_id="a", variant=0) == PLAIN
    assert draw_for(AugmentSettings(), seed=1, sample_id="a", variant=3) == PLAIN
    assert PLAIN.key() == "plain"
    assert PLAIN.tones() is None


@given(seed=st.integers(0, 2**63), id=st.text(max_size=20), variant=st.integers(1, 1000), crop=st.floats(0.01, 1))
def test_a_draw_keeps_to_its_settings(seed: int, id: str, variant: int, crop: float) -> None:
    augment = AugmentSettings(flip=True, crop=crop, colour=0.25)
    draw = draw_for(augment, seed=seed, sample_id=id, variant=variant)
    assert draw == draw_for(augment, seed=seed, sample_id=id, variant=variant)
    left, top, right, bottom = draw.window()
    assert -1e-12 <= left < right <= 1 + 1e-12
    assert -1e-12 <= top < bottom <= 1 + 1e-12
    assert right - left >= crop - 1e-4
    assert right - left == pytest.approx(bottom - top)
    assert 7500 <= draw.brightness <= 12500
    assert 7500 <= draw.contrast <= 12500


def test_draws_differ_by_seed_sample_and_variant_and_are_even() -> None:
    draws = [draw_for(EVERYTHING, seed=s, sample_id=f"a{i}", variant=v)
             for s in (0, 1) for i in range(300) for v in (1, 2)]  # fmt: skip
    assert len({draw.key() for draw in draws}) == len(draws)
    assert 0.4 < np.mean([draw.flip for draw in draws]) < 0.6
    for values in ([d.left for d in draws], [d.top for d in draws], [(d.keep - 8000) * 5 for d in draws]):
        assert np.histogram(values, 5, (0, 10_000))[0].min() > 0.14 * len(draws)
    assert abs(np.corrcoef([d.left for d in draws], [d.top for d in draws])[0, 1]) < 0.1


def test_variants_come_evenly_and_differ_by_epoch_and_repetition() -> None:
    drawn = np.array([[variant_for(seed=0, sample_id=f"a{i}", epoch=e, draw=d, variants=4)
                       for e in range(5) for d in (0, 1)] for i in range(400)])  # fmt: skip
    assert np.bincount(drawn.reshape(-1), minlength=4).min() > 0.22 * drawn.size
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1]) < 0.15
    assert {variant_for(seed=0, sample_id="a", epoch=e, draw=0, variants=1) for e in range(9)} == {0}


def test_a_sample_that_must_not_be_mirrored_differs_in_nothing_else() -> None:
    for variant in range(1, 30):
        free = draw_for(EVERYTHING, seed=0, sample_id="a", variant=variant)
        kept = draw_for(EVERYTHING, seed=0, sample_id="a", variant=variant, may_flip=False)
        assert not kept.flip
        assert (kept.keep, kept.left, kept.top, kept.brightness) == (free.keep, free.left, free.top, free.brightness)


@pytest.mark.parametrize(
    "text",
    [
        "把左边的猫换成狗", "将右侧的人去掉", "顺时针旋转90度", "逆時針旋轉", "把文字改成红色", "写上“大促”",
        "Remove the man on the LEFT",
        "turn it clockwise", "rotate counter-clockwise", "add the text 'SALE'", "change the title",
        "move it rightwards", "What the sign says", "把标题改大", "remove the watermark", "东边的山",
    ],
)  # fmt: skip
def test_instructions_with_sides_or_writing_forbid_mirroring(text: str) -> None:
    assert names_a_side(["make it red", text])


@pytest.mark.parametrize(
    "text",
    [
        "make it bright", "把裙子换成红色", "删除这个东西",
        "add a copyright-free cat", "make it upright", "西瓜换成苹果",
        "a lefthander",
        "enlighten the context", "", "delete the background", "让天空更蓝",
    ],
)  # fmt: skip
def test_other_instructions_allow_it(text: str) -> None:
    assert not names_a_side([text])


def test_tones_are_one_table_for_all_pictures() -> None:
    tones = Draw(brightness=11000, contrast=9000).tones()
    assert tones is not None
    assert tones.shape == (256,)
    assert tones[0] == round((127.5 - 0.9 * 127.5) * 1.1)
    assert (np.diff(tones.astype(int)) >= 0).all()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.augment.flip=true"], "data.augment given .* has no effect: data.variants 1"),
        (["data.variants=4"], "data.variants 4 .* has no effect"),
        (["data.augment.crop=0", "data.variants=2"], "data.augment.crop"),
    ],
)
def test_settings_without_effect_are_told(overrides: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(None, overrides=overrides)
    assert load_settings(None, overrides=["data.augment.flip=true", "data.variants=4"]).settings.data.augment.flip
