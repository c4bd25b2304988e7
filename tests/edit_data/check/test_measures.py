"""What is measured of pictures and pairs: shift and zoom to a fraction of a pixel, whatever the edit."""

from __future__ import annotations

import io

import numpy as np
import pytest
from PIL import Image, ImageDraw

from qwen_edit_zero.edit_data.check.looks import BLANK_SPREAD, SOFT_DETAIL, look_at_mask, look_at_picture
from qwen_edit_zero.edit_data.check.pairs import compare, lies_elsewhere, shows_the_same
from qwen_edit_zero.edit_data.check.texts import LANGUAGES, language_of
from tests.edit_data.check.checked import scene

SEEDS = range(6)
MARGIN = 16


def jpeg(image: Image.Image, quality: int = 80) -> Image.Image:
    out = io.BytesIO()
    image.save(out, "JPEG", quality=quality)
    return Image.open(out).convert("RGB")


def pair(one: Image.Image, other: Image.Image) -> np.ndarray:
    return compare(one, (0, 0, *one.size), other, (0, 0, *other.size))


def window(image: Image.Image, right: float = 0, down: float = 0, zoom: float = 1) -> Image.Image:
    """The middle of a picture, its content shifted and larger by these."""
    width, height = image.width - 2 * MARGIN, image.height - 2 * MARGIN
    x, y = image.width / 2 - right, image.height / 2 - down
    box = (x - width / 2 / zoom, y - height / 2 / zoom, x + width / 2 / zoom, y + height / 2 / zoom)
    return image.resize((width, height), Image.Resampling.BICUBIC, box=box)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("right", "down"), [(3, 0), (0, -2), (-6, 5), (2.5, 2.5)])
def test_a_shift_is_found_to_a_fifth_of_a_pixel(seed: int, right: float, down: float) -> None:
    image = scene(seed)
    found = pair(window(image), jpeg(window(image, right, down)))
    assert lies_elsewhere(found)
    longest = image.width - 2 * MARGIN
    assert float(found["across"]) * longest == pytest.approx(right, abs=0.2)
    assert float(found["down"]) * longest == pytest.approx(down, abs=0.2)
    assert abs(float(found["zoom"])) < 0.002


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("zoom", [0.985, 1.02, 1.04])
def test_a_zoom_is_found_to_a_thousandth_or_two(seed: int, zoom: float) -> None:
    image = scene(seed)
    found = pair(window(image), jpeg(window(image, zoom=zoom)))
    assert lies_elsewhere(found)
    assert float(found["zoom"]) == pytest.approx(zoom - 1, abs=0.003)


def edited(image: Image.Image) -> dict[str, Image.Image]:
    """Edits that leave the rest where it is."""
    pasted = image.copy()
    pasted.paste(scene(99).resize((image.width // 3, image.height // 3)), (40, 50))
    text = image.copy()
    ImageDraw.Draw(text).text((30, 30), "SALE 50 %", fill="white", font_size=40)
    return {
        "recompressed": jpeg(image, 60),
        "smaller": image.resize((image.width * 3 // 4, image.height * 3 // 4), Image.Resampling.LANCZOS),
        "pasted": pasted,
        "text": text,
        "grey": image.convert("L").convert("RGB"),
        "negative": image.point(lambda level: 255 - level),
        "darker": image.point(lambda level: level // 2),
        "another picture": scene(98, *image.size),
    }


@pytest.mark.parametrize("seed", SEEDS)
def test_what_stays_in_its_place_is_not_said_to_have_moved(seed: int) -> None:
    image = scene(seed)
    moved = {name: pair(image, jpeg(other)) for name, other in edited(image).items()}
    assert [name for name, found in moved.items() if lies_elsewhere(found)] == []


@pytest.mark.parametrize("seed", SEEDS)
def test_compression_and_size_are_no_difference_and_edits_are(seed: int) -> None:
    image = scene(seed, 800, 640)
    same = {name for name, other in edited(image).items() if shows_the_same(pair(image, jpeg(other)))}
    assert same == {"recompressed", "smaller"}
    dotted = image.copy()
    dotted.paste("red", (100, 100, 120, 120))  # less than a thousandth of the picture
    assert not shows_the_same(pair(image, jpeg(dotted)))


@pytest.mark.parametrize("seed", SEEDS)
def test_enlarged_pictures_have_no_fine_detail(seed: int) -> None:
    image = scene(seed, 512, 384)
    assert float(look_at_picture(jpeg(image))["detail"]) > SOFT_DETAIL
    small = image.resize((image.width // 2, image.height // 2), Image.Resampling.LANCZOS)
    for method in (Image.Resampling.BICUBIC, Image.Resampling.LANCZOS):
        enlarged = small.resize(image.size, method)
        assert float(look_at_picture(enlarged)["detail"]) < SOFT_DETAIL


def test_of_small_and_of_plain_pictures_no_detail_is_expected() -> None:
    assert float(look_at_picture(scene(0, 200, 200))["detail"]) == -1
    assert float(look_at_picture(Image.new("RGB", (600, 600), "red"))["detail"]) == -1


def test_pictures_of_one_colour_and_masks_of_one_level_are_known() -> None:
    assert float(look_at_picture(Image.new("RGB", (64, 64), "#204060"))["spread"]) < BLANK_SPREAD
    assert float(look_at_picture(scene(0, 64, 64))["spread"]) > BLANK_SPREAD
    mask = Image.new("L", (64, 64))
    assert int(look_at_mask(mask)["lightest"]) == 0
    mask.putpixel((9, 9), 255)
    assert int(look_at_mask(mask)["lightest"]) == 255


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("把背景换成雪地", "zh"), ("make it red", "en"), ("把 yellow 色的贴纸去掉", "mixed"),
        ("写上“SALE”", "zh"), ('write "你好" on it', "en"), ("“你好”", "zh"), ("空を青くして", "other"),
        ("сделай красным", "other"), ("add a café", "en"), ("...!?", "none"), ("123", "none"),
        ("파란색으로 바꿔", "other"), ("a", "en"),
    ],
)  # fmt: skip
def test_the_language_is_that_of_the_words_outside_quotations(text: str, language: str) -> None:
    assert LANGUAGES[language_of(text)] == language
