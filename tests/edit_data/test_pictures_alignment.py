"""Source, references, mask and target of a sample: nothing shifts or zooms between them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from qwen_edit_zero.edit_data.pictures.alignment import (
    Align,
    Size,
    frames_of,
    grid_size,
    prepared_sizes,
)
from qwen_edit_zero.edit_data.pictures.draws import PLAIN, Draw, draw_for
from qwen_edit_zero.edit_data.pictures.masks import area_mean
from qwen_edit_zero.edit_data.pictures.prepare import Areas, Pictures, plan, prepare
from qwen_edit_zero.errors import DataError
from qwen_edit_zero.settings.models import AugmentSettings

AREAS = Areas(vae=256 * 256, condition=128 * 128)
EVERYTHING = AugmentSettings(flip=True, crop=0.6, colour=0.2)
DRAWS = [PLAIN, *(draw_for(EVERYTHING, seed=1, sample_id="a", variant=v) for v in range(1, 5)), Draw(flip=True)]
ODD = [(1023, 767), (767, 1023), (17, 31), (640, 481), (333, 1000), (129, 97)]


def noise(size: Size, seed: int = 0) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))


def blob(size: Size, at: tuple[float, float], width: float = 0.06) -> Image.Image:
    """A soft light dot at a place, and of a width, given as shares of the sides: the same scene at any resolution."""
    x, y = ((np.arange(side) + 0.5) / side for side in size)
    wave = np.exp(-((x[None] - at[0]) ** 2 + (y[:, None] - at[1]) ** 2) / (2 * width**2))
    return Image.fromarray(np.rint(wave * 255).astype(np.uint8))


def centroid(values: np.ndarray) -> tuple[float, float]:
    """Of the light of a picture, as shares of the sides."""
    total = values.sum()
    height, width = values.shape
    x, y = (np.arange(width) + 0.5) / width, (np.arange(height) + 0.5) / height
    return float((values.sum(0) * x).sum() / total), float((values.sum(1) * y).sum() / total)


@pytest.mark.parametrize("draw", DRAWS, ids=Draw.key)
@pytest.mark.parametrize("size", ODD)
def test_pictures_of_one_size_go_through_the_same_to_the_last_bit(size: Size, draw: Draw) -> None:
    picture = noise(size)
    prepared = prepare(Pictures(picture, (picture, noise(size, 1), picture)), draw, AREAS)
    assert prepared.target.tobytes() == prepared.references[0].tobytes() == prepared.references[2].tobytes()
    assert prepared.shown[0].tobytes() == prepared.shown[2].tobytes()
    assert {p.size for p in prepared.references} == {prepared.target.size}


@pytest.mark.parametrize("draw", DRAWS[:3], ids=Draw.key)
@pytest.mark.parametrize(("source", "target"), [
    ((1023, 767), (1024, 768)), ((1023, 767), (2046, 1534)), ((2047, 1535), (1023, 767)), ((640, 481), (1280, 961)),
    ((1365, 767), (1820, 1023)), ((301, 401), (1203, 1604)),
])  # fmt: skip
def test_a_dot_stays_at_its_place_whatever_the_resolutions(source: Size, target: Size, draw: Draw) -> None:
    """Centres of a dot in the source, the mask and the target agree within 0.01 pixels after preparation."""
    at = (0.47, 0.53)
    pictures = Pictures(blob(target, at).convert("RGB"), (blob(source, at).convert("RGB"),), blob(source, at))
    draw = Draw(keep=draw.keep, left=draw.left, top=draw.top, flip=draw.flip)  # tones clip light, which moves centres
    prepared = prepare(pictures, draw, AREAS)
    width, height = prepared.target.size
    assert prepared.references[0].size == (width, height)
    assert prepared.mask is not None
    assert prepared.mask.shape == (height // 8, width // 8)
    expected = centroid(np.asarray(prepared.target.getchannel("R"), np.float64))
    for other in (np.asarray(prepared.references[0].getchannel("R"), np.float64), prepared.mask.astype(np.float64)):
        found = centroid(other)
        assert abs(found[0] - expected[0]) * width < 0.01
        assert abs(found[1] - expected[1]) * height < 0.01
    left, top, right, bottom = draw.window()
    wanted = ((at[0] - left) / (right - left), (at[1] - top) / (bottom - top))
    wanted = (1 - wanted[0] if draw.flip else wanted[0], wanted[1])
    assert abs(expected[0] - wanted[0]) * width < 0.5  # light cut off at the edges moves the centre a little
    assert abs(expected[1] - wanted[1]) * height < 0.5


@pytest.mark.parametrize("draw", [Draw(flip=True), Draw(keep=5000, left=5000, top=5000)], ids=Draw.key)
def test_a_draw_does_what_it_says(draw: Draw) -> None:
    board = np.kron(np.indices((8, 8)).sum(0) % 2 * 255, np.ones((32, 32))).astype(np.uint8)
    board[:32, :32] = 128  # tells left from right
    prepared = prepare(Pictures(Image.fromarray(board).convert("RGB"), ()), draw, AREAS)
    found = np.asarray(prepared.target.getchannel("R"))
    if draw.flip:
        assert np.array_equal(found, board[:, ::-1])
    else:  # nothing shows the target's frame, so it is not cropped alone
        assert np.array_equal(found, board)
        picture = Image.fromarray(board).convert("RGB")
        both = prepare(Pictures(picture, (picture,)), draw, AREAS)
        middle = picture.crop((64, 64, 192, 192)).resize((256, 256), Image.Resampling.LANCZOS)
        assert both.target.tobytes() == both.references[0].tobytes() == middle.tobytes()


def test_references_of_another_frame_stay_whole_but_are_mirrored_and_toned_too() -> None:
    target, dress = noise((320, 240)), noise((240, 240), 1)
    draw = Draw(flip=True, keep=7000, left=1000, top=9000, brightness=9000)
    both = prepare(Pictures(target, (dress, target)), draw, AREAS)
    alone = prepare(Pictures(dress, ()), Draw(flip=True, brightness=9000), AREAS)
    assert both.references[0].tobytes() == alone.target.tobytes()
    assert both.references[1].tobytes() == both.target.tobytes()
    assert plan((320, 240), [(240, 240), (320, 240)], areas=AREAS, draw=draw).cropped
    assert not plan((320, 240), [(240, 240)], areas=AREAS, draw=draw).cropped


@given(
    target=st.tuples(st.integers(64, 4000), st.integers(64, 4000)),
    references=st.lists(st.tuples(st.integers(64, 4000), st.integers(64, 4000)), max_size=3),
    variant=st.integers(1, 100),
    align=st.sampled_from(["none", "crop"]),
)
@settings(deadline=None, max_examples=200)
def test_what_is_drawn_changes_no_size_and_stays_inside(
    target: Size, references: list[Size], variant: int, align: Align
) -> None:
    draw = draw_for(EVERYTHING, seed=3, sample_id="x", variant=variant)
    plain, drawn = (plan(target, references, areas=AREAS, draw=d, align=align, mask=target) for d in (PLAIN, draw))
    assert plain.mask is not None
    assert drawn.mask is not None
    for a, b, size in zip(
        (plain.target, *plain.references, *plain.shown, plain.mask),
        (drawn.target, *drawn.references, *drawn.shown, drawn.mask),
        (target, *references, *references, target),
        strict=True,
    ):
        assert a.size == b.size
        left, top, right, bottom = b.box or (0, 0, *size)
        assert 0 <= left < right <= size[0]
        assert 0 <= top < bottom <= size[1]


@given(
    sizes=st.lists(st.lists(st.tuples(st.integers(8, 3000), st.integers(8, 3000)), min_size=4, max_size=4), max_size=9),
    present=st.integers(1, 4),
    align=st.sampled_from(["none", "crop"]),
)
@settings(deadline=None)
def test_columns_of_sizes_give_what_single_samples_give(sizes: list[list[Size]], present: int, align: Align) -> None:
    table = np.array([row[:present] + [(0, 0)] * (4 - present) for row in sizes], np.int32).reshape(-1, 4, 2)
    columns = prepared_sizes(table, area=AREAS.vae, align=align)
    for row, got in zip(sizes, columns, strict=True):
        frames = frames_of(row[0], tuple(row[1:present]), area=AREAS.vae, align=align)
        assert tuple(map(tuple, got[:present].tolist())) == frames.sizes
        assert not got[present:].any()


def test_sizes_are_those_of_the_pipelines_rule() -> None:
    rng = np.random.default_rng(0)
    for width, height in rng.integers(8, 5000, (500, 2)).tolist():
        ratio = width / height
        wide = math.sqrt(1024 * 1024 * ratio)
        assert grid_size(width, height, area=1024 * 1024) == (round(wide / 32) * 32, round(wide / ratio / 32) * 32)


def test_a_target_takes_the_grid_of_the_reference_whose_frame_it_shows() -> None:
    """Sizes a pixel apart can fall on two grids; the pipeline's output has the last reference's."""
    found = 0
    for height in range(500, 1500):
        one, other = grid_size(1000, height, area=AREAS.vae), grid_size(2001, 2 * height, area=AREAS.vae)
        frames = frames_of((2001, 2 * height), ((1000, height),), area=AREAS.vae)
        assert frames.sizes == (one, one)
        assert frames.aligned == (True, True)
        found += one != other
    assert found


def test_a_reference_cut_to_a_multiple_is_stretched_or_cut_as_the_setting_says() -> None:
    target = noise((324, 243))
    source = target.crop((2, 1, 322, 241))  # 320 x 240: the middle of it
    pictures = Pictures(target, (source,))
    assert frames_of(target.size, (source.size,), area=AREAS.vae).nearly == (False, False)  # of one aspect: 4:3
    cut = prepare(pictures, PLAIN, AREAS, align="crop")
    assert cut.target.tobytes() == cut.references[0].tobytes()

    source = target.crop((0, 1, 324, 241))  # 324 x 240
    pictures = Pictures(target, (source,))
    assert frames_of(target.size, (source.size,), area=AREAS.vae).nearly == (False, True)
    assert frames_of(target.size, (source.size,), area=AREAS.vae, align="crop").nearly == (False, False)
    cut = prepare(pictures, PLAIN, AREAS, align="crop")
    assert cut.target.tobytes() == cut.references[0].tobytes()
    stretched = prepare(pictures, PLAIN, AREAS, align="none")
    assert stretched.references[0].tobytes() == prepare(Pictures(source, ()), PLAIN, AREAS).target.tobytes()
    assert stretched.target.tobytes() == prepare(Pictures(target, ()), PLAIN, AREAS).target.tobytes()
    assert stretched.references[0].tobytes() != stretched.target.tobytes()


def test_pictures_far_from_the_targets_size_are_not_cut() -> None:
    what = plan((1024, 768), [(1024, 1024), (512, 380), (1100, 768)], areas=AREAS, align="crop")
    assert [p.box for p in (what.target, *what.references)] == [None] * 4


def test_a_mask_of_another_aspect_is_refused_with_both_sizes() -> None:
    with pytest.raises(DataError, match=r"mask is 300 x 300 pixels.*1024 x 768"):
        plan((1024, 768), [(1024, 768)], areas=AREAS, mask=(300, 300))
    assert plan((1024, 768), [(1024, 768)], areas=AREAS, mask=(341, 256)).mask is not None


def test_a_picture_too_long_for_an_area_is_refused() -> None:
    with pytest.raises(DataError, match=r"3000 x 8 pixels.*data\.vae_area"):
        plan((3000, 8), [], areas=AREAS)
    with pytest.raises(DataError, match=r"4000 x 64 pixels.*data\.condition_area"):
        plan((64, 64), [(4000, 64)], areas=Areas(vae=1024 * 1024, condition=64 * 64))


@given(
    size=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    cells=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    corner=st.tuples(st.floats(0, 0.4), st.floats(0, 0.4)),
    seed=st.integers(0, 5),
)
@settings(deadline=None)
def test_cells_of_a_mask_hold_its_exact_mean(size: Size, cells: Size, corner: tuple[float, float], seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 256, (size[1], size[0]), dtype=np.uint8)
    left, top = corner[0] * size[0], corner[1] * size[1]
    right, bottom = left + 0.6 * size[0], top + 0.6 * size[1]
    grid = area_mean(Image.fromarray(values), (left, top, right, bottom), cells)

    def cover(start: float, end: float, count: int) -> np.ndarray:
        """How much of each pixel lies between two places."""
        edges = np.arange(count + 1)
        return np.clip(np.minimum(edges[1:], end) - np.maximum(edges[:-1], start), 0, None)

    x, y = np.linspace(left, right, cells[0] + 1), np.linspace(top, bottom, cells[1] + 1)
    column, line = cells[0] // 2, cells[1] // 3
    weights = np.outer(cover(y[line], y[line + 1], size[1]), cover(x[column], x[column + 1], size[0]))
    assert grid.shape == (cells[1], cells[0])
    assert grid.dtype == np.float32
    assert grid[line, column] == pytest.approx((weights * values / 255).sum() / weights.sum(), abs=1e-5)


def test_a_mask_is_mirrored_and_cropped_with_its_target() -> None:
    mask = Image.new("L", (256, 256))
    mask.paste(255, (0, 0, 64, 256))
    picture = noise((256, 256))
    plain, flipped, cropped = (
        prepare(Pictures(picture, (picture,), mask), draw, AREAS).mask
        for draw in (PLAIN, Draw(flip=True), Draw(keep=5000, left=0, top=0))
    )
    assert plain is not None
    assert flipped is not None
    assert cropped is not None
    assert plain[:, :8].min() == 1
    assert plain[:, 8:].max() == 0
    assert np.array_equal(flipped, plain[:, ::-1])
    assert cropped[:, :16].min() == 1
    assert cropped[:, 16:].max() == 0
