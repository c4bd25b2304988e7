from __future__ import annotations

import io
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageFile

from qwen_edit_zero.edit_data.pictures import decode as pictures
from qwen_edit_zero.edit_data.pictures.decode import load_picture, picture_size
from qwen_edit_zero.errors import DataError
from tests.edit_data.builders import CASES, quadrants, save

IMAGES = CASES / "images"


def pixels(path: Path) -> np.ndarray:
    image = load_picture(path)
    assert image.mode == "RGB"
    assert image.size == picture_size(path)
    return np.asarray(image).astype(int)


def difference(path: Path, other: Image.Image) -> float:
    mine = pixels(path)
    assert mine.shape[:2] == other.size[::-1]
    return float(np.abs(mine - np.asarray(other.convert("RGB")).astype(int)).mean())


@pytest.mark.parametrize(
    "name",
    [
        *(f"exif_orientation_{i}.jpg" for i in (2, 3, 4, 7, 8)), "exif_orientation_6.webp",
        "exif_orientation_9_invalid.jpg", "exif_corrupt.jpg", "cmyk_adobe.jpg", "cmyk_no_app14.jpg",
        "rgba_fully_opaque.png", "phone_mpo.jpg", "really_png.jpg", "really_webp.png", "UPPER.JPG", "double.png.jpg",
        "photo.avif", "photo.jp2",
    ],
)  # fmt: skip
def test_each_of_these_files_shows_the_canonical_picture(name: str) -> None:
    assert difference(IMAGES / name, Image.open(IMAGES / "canonical_upright.png")) < 12


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("zero_byte.jpg", "empty"), ("one_byte.png", "accepted format"), ("jpeg_header_only.jpg", "header"),
        ("truncated_progressive.jpg", "truncated"), ("missing_last_2_bytes.jpg", "truncated"),
        ("bad_crc.png", "checksum of its IDAT"), ("bit_rot.png", "checksum of its IDAT"), ("really_svg.png", "SVG"),
        ("bomb_10000x10000_1bit.png", "10000 x 10000"), ("bomb_14000x14000_1bit.png", "pixels"),
        ("size_1x1.png", "at least 8"), ("size_4000x1.png", "at least 8"), ("size_8x2048.png", "200 times"),
        ("animated_empty_first_frame.gif", "transparent everywhere"), ("gray_float32.tif", "mode F"),
        ("Thumbs.db", "accepted format"), ("._hidden.png", "accepted format"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_name_and_reason(name: str, reason: str) -> None:
    with pytest.raises(DataError) as error:
        load_picture(IMAGES / name)
    assert name in str(error.value)
    assert reason in str(error.value)


@pytest.mark.parametrize(
    "name",
    ["zero_byte.jpg", "really_svg.png", "bomb_10000x10000_1bit.png", "bomb_14000x14000_1bit.png", "size_1x1.png"],
)
def test_the_header_alone_refuses_what_breaks_a_limit(name: str) -> None:
    with pytest.raises(DataError, match=name):
        picture_size(IMAGES / name)


def test_a_wrong_checksum_is_found_before_the_picture_is_used(tmp_path: Path) -> None:
    data = bytearray(save(tmp_path / "a.png").read_bytes())
    at = data.index(b"IDAT")
    length = int.from_bytes(data[at - 4 : at], "big")
    data[at + 4 + length] ^= 1
    (tmp_path / "a.png").write_bytes(data)
    with pytest.raises(DataError, match=r"a\.png.*checksum of its IDAT chunk is wrong"):
        load_picture(tmp_path / "a.png")


@pytest.mark.parametrize("kind", ["png", "jpg", "webp", "gif", "bmp", "tif", "jp2", "avif"])
def test_a_file_cut_in_half_is_refused_whatever_its_format(tmp_path: Path, kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    path = tmp_path / f"a.{kind}"
    Image.fromarray(noise).save(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(DataError, match=f"a\\.{kind}"):
        load_picture(path)


def test_truncation_is_refused_even_when_another_library_allowed_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    path = save(tmp_path / "a.jpg", (64, 64))
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match="truncated"):
        load_picture(path)


@pytest.mark.parametrize("kind", ["jpg", "png", "webp", "tif", "avif"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation_is_applied_once_and_is_gone_afterwards(tmp_path: Path, kind: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    turn = {1: None, **pictures._TURN}[orientation]
    stored = quadrants()
    if turn is not None:  # the stored pixels are such that turning them gives the upright picture
        undo = {
            Image.Transpose.ROTATE_90: Image.Transpose.ROTATE_270,
            Image.Transpose.ROTATE_270: Image.Transpose.ROTATE_90,
        }
        stored = stored.transpose(undo.get(turn, turn))
    path = tmp_path / f"a.{kind}"
    stored.save(path, exif=exif)
    assert difference(path, quadrants()) < 12
    loaded = load_picture(path)
    assert not loaded.getexif()
    loaded.save(tmp_path / "again.png")
    assert difference(tmp_path / "again.png", loaded) == 0


def test_exif_behind_the_pixels_of_a_png_counts_as_much(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    body = exif.tobytes()[6:]
    chunk = len(body).to_bytes(4, "big") + b"eXIf" + body + zlib.crc32(b"eXIf" + body).to_bytes(4, "big")
    data = save(tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(data[:-12] + chunk + data[-12:])
    assert picture_size(tmp_path / "a.png") == (32, 48)
    assert difference(tmp_path / "a.png", quadrants().transpose(Image.Transpose.ROTATE_270)) == 0


def test_transparency_shows_white() -> None:
    left = pixels(IMAGES / "rgba_hidden_magenta.png")[:, :20]
    assert (left == 255).all()
    assert (pixels(IMAGES / "rgb_trns_colorkey.png")[8, 12] == 255).all()
    canonical = pixels(IMAGES / "canonical_upright.png")
    blended = pixels(IMAGES / "palette_trns_bytes.png")
    assert (blended >= canonical - 1).all()  # white mixed in makes nothing darker
    assert np.abs(blended - canonical).max() > 50


@pytest.mark.parametrize("mode", ["LA", "RGBA"])
def test_half_transparent_black_is_mid_grey(tmp_path: Path, mode: str) -> None:
    Image.new(mode, (16, 16), (0,) * (len(mode) - 1) + (128,)).save(tmp_path / "a.png")
    assert set(np.unique(pixels(tmp_path / "a.png"))) == {127}


@pytest.mark.parametrize("name", ["gray_16bit_ramp.png", "gray_16bit_bigendian.tif"])
def test_a_16_bit_ramp_keeps_all_its_levels(name: str) -> None:
    levels = pixels(IMAGES / name)[0, :, 0]
    assert levels.min() == 0
    assert levels.max() == 255
    assert len(np.unique(levels)) == 256


def test_12_bit_data_in_16_bits_stays_dark() -> None:
    assert pixels(IMAGES / "gray_16bit_12bit_range.png").max() == 4095 >> 8


def test_16_bits_a_channel_keep_all_their_levels() -> None:
    ramp = pixels(IMAGES / "rgb_16bit.png")[0]
    assert len(np.unique(ramp[:, 0])) == 256
    assert ramp[0, 0] == 0
    assert ramp[-1, 0] == 255
    assert ramp[0, 1] == 255


def test_a_16_bit_grey_colour_key_is_transparent(tmp_path: Path) -> None:
    values = np.full((16, 16), 1000, np.uint16)
    values[:8] = 2000
    Image.fromarray(values).save(tmp_path / "a.png", transparency=1000)
    got = pixels(tmp_path / "a.png")
    assert (got[8:] == 255).all()
    assert (got[:8] == 2000 >> 8).all()


def test_one_bit_and_palette_pictures_become_rgb(tmp_path: Path) -> None:
    quadrants().convert("1").save(tmp_path / "bit.png")
    assert set(np.unique(pixels(tmp_path / "bit.png"))) == {0, 255}
    quadrants().quantize(16).save(tmp_path / "palette.gif")
    assert difference(tmp_path / "palette.gif", quadrants()) < 3


def test_of_an_animation_the_first_frame_counts() -> None:
    first = Image.open(IMAGES / "animated_apng.png")
    first.seek(0)
    assert difference(IMAGES / "animated_apng.png", first) == 0


def test_a_wide_gamut_profile_is_converted() -> None:
    stored = np.asarray(Image.open(IMAGES / "icc_wide_gamut.png").convert("RGB")).astype(int)
    assert np.abs(pixels(IMAGES / "icc_wide_gamut.png") - stored).max() > 5


def srgb_profile() -> bytes:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


@pytest.mark.parametrize("profile", [srgb_profile(), b"no profile at all", srgb_profile()[:200]])
def test_a_profile_that_is_srgb_or_broken_leaves_the_pixels_alone(tmp_path: Path, profile: bytes) -> None:
    path = save(tmp_path / "a.png", icc_profile=profile)
    assert difference(path, quadrants()) == 0


def test_an_rgb_profile_on_a_grey_picture_is_disregarded(tmp_path: Path) -> None:
    quadrants().convert("L").save(tmp_path / "a.jpg", icc_profile=srgb_profile(), quality=95)
    assert difference(tmp_path / "a.jpg", quadrants().convert("L")) < 3


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"<!DOCTYPE html><html>404", "web page"), (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
        (b'<?xml version="1.0"?><svg/>', "SVG"), (b"\0" * 64, "accepted format"), (b"%PDF-1.7", "PDF"),
    ],
)  # fmt: skip
def test_files_that_are_no_pictures_are_told_apart(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(DataError, match=reason):
        load_picture(tmp_path / "a.png")


def test_formats_that_run_other_programs_are_not_opened(tmp_path: Path) -> None:
    quadrants().save(tmp_path / "a.eps")
    with pytest.raises(DataError, match="accepted format"):
        load_picture(tmp_path / "a.eps")


@pytest.mark.parametrize("use", [load_picture, picture_size])
def test_folders_and_missing_files_are_named(tmp_path: Path, use: object) -> None:
    assert callable(use)
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(DataError, match=r"folder\.png.*folder"):
        use(tmp_path / "folder.png")
    with pytest.raises(DataError, match=r"none\.png.*no such file"):
        use(tmp_path / "none.png")


@pytest.mark.parametrize("use", [load_picture, picture_size])
def test_byte_and_aspect_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: object) -> None:
    assert callable(use)
    Image.new("RGB", (16 * 201, 16)).save(tmp_path / "long.png")
    with pytest.raises(DataError, match="200 times"):
        use(tmp_path / "long.png")
    monkeypatch.setattr(pictures, "MAX_BYTES", 100)
    with pytest.raises(DataError, match="limit is 100"):
        use(save(tmp_path / "big.png"))


def test_every_odd_file_is_either_rgb_or_refused_by_name() -> None:
    for path in sorted(IMAGES.iterdir()):
        try:
            pixels(path)
        except DataError as error:
            assert path.name in str(error)  # noqa: PT017 - either outcome is right, but nothing else is


def test_a_line_break_in_a_name_stays_on_one_line_of_the_message(tmp_path: Path) -> None:
    (tmp_path / "new\nline.png").write_bytes(b"")
    with pytest.raises(DataError) as error:
        load_picture(tmp_path / "new\nline.png")
    assert "\n" not in str(error.value)


def test_memory_given_back_is_independent_of_the_file(tmp_path: Path) -> None:
    path = save(tmp_path / "a.png")
    image = load_picture(path)
    path.unlink()
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    assert image.info == {}
