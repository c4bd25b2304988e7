"""Pictures beyond the list of cases: what Pillow reads wrongly, passes over in silence, or may not be trusted with."""

from __future__ import annotations

import io
import struct
import tracemalloc
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms

from qwen_edit_zero.edit_data.pictures.decode import load_mask, load_picture, picture_size
from qwen_edit_zero.errors import DataError
from tests.edit_data.builders import CASES, quadrants
from tests.edit_data.raw_pictures import chunk, encoded, held, png, tiff

RAMP = (np.arange(16) * 4096).astype("<u2")  # 16 levels of 16 bits
NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (96, 128, 3), dtype=np.uint8))


def pixels(content: bytes) -> np.ndarray:
    image = load_picture(held(content))
    assert image.mode == "RGB"
    assert image.size == picture_size(held(content))
    return np.asarray(image).astype(int)


def reason(content: bytes) -> str:
    with pytest.raises(DataError, match="a\\.png") as error:
        load_picture(held(content))
    return str(error.value)


# Meaning


@pytest.mark.parametrize(("bits", "key", "row"), [
    (1, 0, b"\x00\xff"), (2, 1, b"\x55\x55\xff\xff"), (4, 5, b"\x55" * 4 + b"\xff" * 4),
    (8, 5, b"\5" * 8 + b"\xff" * 8),
])  # fmt: skip
def test_a_transparent_grey_counts_at_every_bit_depth(bits: int, key: int, row: bytes) -> None:
    found = pixels(png(16, 16, bits=bits, colour=0, rows=[row] * 16, before=chunk(b"tRNS", struct.pack(">H", key))))
    assert (found == 255).all()  # the left half is white because it is transparent, the right one by itself


@pytest.mark.parametrize("key", [5, 1000])
def test_a_transparent_colour_of_16_bits_is_refused_because_8_bits_cannot_tell_it(key: int) -> None:
    row = struct.pack(">HHH", 0x0505, 0x0505, 0x0505) * 16
    before = chunk(b"tRNS", struct.pack(">HHH", key, key, key))
    assert "16 bits a channel" in reason(png(16, 16, bits=16, colour=2, rows=[row] * 16, before=before))


@pytest.mark.parametrize(("colour", "pixel"), [(4, (0x8000, 0x8000)), (6, (0x8000, 0x8000, 0x8000, 0x8000))])
def test_16_bits_with_alpha_are_blended_on_white(colour: int, pixel: tuple[int, ...]) -> None:
    row = struct.pack(f">{len(pixel)}H", *pixel) * 16
    assert set(np.unique(pixels(png(16, 16, bits=16, colour=colour, rows=[row] * 16)))) == {191}


def test_16_bits_with_alpha_and_interlaced_are_read_too() -> None:
    # Pillow writes no interlaced files; the passes of one made of equal pixels are all equal.
    pixel = struct.pack(">HHHH", 0x4000, 0x8000, 0xC000, 0xFFFF)
    passes = [(2, 2), (2, 2), (4, 2), (4, 4), (8, 4), (8, 8), (16, 8)]  # of 16 x 16
    data = b"".join((b"\0" + pixel * across) * down for across, down in passes)
    header = struct.pack(">IIBBBBB", 16, 16, 16, 6, 0, 0, 1)

    def file(pixels: bytes) -> bytes:
        chunks = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")
        return b"\x89PNG\r\n\x1a\n" + chunks

    assert (pixels(file(data)) == [0x40, 0x80, 0xC0]).all()
    for missing in (9, 129, 1000):
        found = reason(file(data[:-missing]))
        assert "ends after" in found or "truncated" in found


@pytest.mark.parametrize("photometric", [0, 1])
def test_16_bit_greys_of_tiff_go_by_what_it_calls_white(photometric: int) -> None:
    found = pixels(tiff(16, 16, np.tile(RAMP, 16).tobytes(), bits=16, photometric=photometric))[0, :, 0]
    assert found.tolist() == [v if photometric else 255 - v for v in range(0, 256, 16)]


def test_12_bit_greys_of_tiff_fill_the_range_they_state() -> None:
    row = b"".join(bytes([v >> 4, (v & 15) << 4 | (v + 256) >> 8, (v + 256) & 255]) for v in range(0, 4096, 512))
    assert pixels(tiff(16, 16, row * 16, bits=12, photometric=1))[0, :, 0].tolist() == list(range(0, 256, 16))


def test_inks_of_tiff_are_not_inverted() -> None:
    cyan = bytes([255, 0, 0, 0]) * 256
    assert (pixels(tiff(16, 16, cyan, bits=8, photometric=5, samples=4)) == [0, 255, 255]).all()
    assert (pixels(tiff(16, 16, b"".join(bytes([v, v]) for v in cyan), bits=16, photometric=5, samples=4))
            == [0, 255, 255]).all()  # fmt: skip


@pytest.mark.parametrize(("bits", "sample_format", "photometric", "samples"), [
    (16, 2, 1, 1), (32, 1, 1, 1), (32, 3, 1, 1), (8, 1, 8, 3),
])  # fmt: skip
def test_signed_32_bit_float_and_lab_tiffs_are_refused(
    bits: int, sample_format: int, photometric: int, samples: int
) -> None:
    data = bytes(16 * 16 * samples * bits // 8)
    found = reason(tiff(16, 16, data, bits=bits, photometric=photometric, samples=samples, sample_format=sample_format))
    assert "whose range is not stated" in found


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw", "tiff_adobe_deflate", "packbits", "jpeg"])
def test_compressed_tiffs_and_the_first_of_several_pages_are_read(compression: str) -> None:
    content = encoded(
        quadrants(), "TIFF", compression=compression, save_all=True, append_images=[Image.new("RGB", (64, 64))]
    )
    assert np.abs(pixels(content) - np.asarray(quadrants()).astype(int)).mean() < 12


def test_a_cameras_raw_file_is_not_taken_for_its_thumbnail() -> None:
    content = tiff(16, 16, bytes(768), bits=8, photometric=2, samples=3, more=[(254, [1])])
    assert "thumbnail" in reason(content)
    with pytest.raises(DataError, match="thumbnail"):
        picture_size(held(content))


def test_where_a_gifs_first_frame_leaves_its_canvas_free_there_is_white() -> None:
    frame = Image.new("P", (20, 20), 1)
    frame.putpalette([0, 255, 0, 255, 0, 0])
    content = bytearray(encoded(frame, "GIF"))
    at = content.index(b",\0\0\0\0\x14\0\x14\0")
    content[at + 1 : at + 5], content[6:10] = struct.pack("<HH", 5, 5), struct.pack("<HH", 40, 40)
    found = pixels(bytes(content))
    assert (found[5:25, 5:25] == [255, 0, 0]).all()
    found[5:25, 5:25] = 255
    assert (found == 255).all()


@pytest.mark.parametrize("lossless", [True, False])
def test_of_an_animated_webp_the_first_frame_counts_with_its_alpha(lossless: bool) -> None:
    first = quadrants().convert("RGBA")
    first.paste((0, 0, 0, 0), (0, 0, 24, 32))
    content = encoded(first, "WEBP", lossless=lossless, save_all=True, append_images=[Image.new("RGBA", first.size)])
    found = pixels(content)
    assert (found[4:-4, 4:16] > 250).all()
    assert np.abs(found[4:-4, 32:44] - np.asarray(quadrants())[4:-4, 32:44]).mean() < 8


def test_an_avif_turned_by_its_container_is_upright() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    content = encoded(quadrants(), "AVIF", exif=exif)
    assert b"irot" in content  # the encoder states the turn there, and decoders need not look at EXIF
    expected = np.asarray(quadrants().transpose(Image.Transpose.ROTATE_270)).astype(int)
    assert np.abs(pixels(content) - expected).mean() < 12


def test_orientation_in_xmp_alone_does_not_count() -> None:
    xmp = b'<x:xmpmeta xmlns:x="adobe:ns:meta/"><rdf:Description tiff:Orientation="6"/></x:xmpmeta>'
    content = encoded(quadrants(), "JPEG", xmp=xmp, quality=95)
    assert b"tiff:Orientation" in content
    assert np.abs(pixels(content) - np.asarray(quadrants()).astype(int)).mean() < 6


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_bmps_with_palettes_are_read(bits: int) -> None:
    few = quadrants().quantize(min(2**bits, 200))
    expected = np.asarray(few.convert("RGB")).astype(int)
    assert np.abs(pixels(encoded(few, "BMP")) - expected).max() == 0


def grey_profile() -> bytes:
    """A minimal grey ICC profile with gamma 1.0: its mid grey is far lighter in sRGB."""
    white = b"XYZ \0\0\0\0" + struct.pack(">iii", 63190, 65536, 54061)
    curve = b"curv\0\0\0\0" + struct.pack(">I", 0)
    text = b"desc\0\0\0\0" + struct.pack(">I", 5) + b"grey\0" + bytes(78)
    tags, body = [(b"wtpt", white), (b"kTRC", curve), (b"desc", text)], b""
    table = struct.pack(">I", len(tags))
    for name, data in tags:
        table += name + struct.pack(">II", 128 + 4 + 12 * len(tags) + len(body), len(data))
        body += data + bytes(-len(data) % 4)
    head = struct.pack(">I4sI4s4s4s", 128 + len(table) + len(body), b"\0" * 4, 0x02400000, b"mntr", b"GRAY", b"XYZ ")
    head += bytes(12) + b"acsp" + bytes(28) + struct.pack(">iii", 63190, 65536, 54061)
    return head.ljust(128, b"\0") + table + body


def test_a_grey_profile_is_converted() -> None:
    found = pixels(encoded(Image.new("L", (16, 16), 64), "PNG", icc_profile=grey_profile()))
    assert found[0, 0].tolist() == pytest.approx([137] * 3, abs=2)  # linear 0.25 in sRGB


def test_a_profile_for_inks_on_an_rgb_picture_is_disregarded() -> None:
    profile = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes())
    profile[16:20] = b"CMYK"
    assert np.array_equal(pixels(encoded(NOISE, "PNG", icc_profile=bytes(profile))), np.asarray(NOISE).astype(int))


@pytest.mark.parametrize(("transfer", "name"), [(16, "PQ"), (18, "HLG")])
def test_high_dynamic_range_is_refused(transfer: int, name: str) -> None:
    content = png(16, 16, bits=8, colour=2, rows=[b"\x80" * 48] * 16, before=chunk(b"cICP", bytes([9, transfer, 0, 1])))
    assert name in reason(content)
    avif = encoded(NOISE, "AVIF")
    at = avif.index(b"colrnclx") + 10
    assert name in reason(avif[:at] + struct.pack(">H", transfer) + avif[at + 2 :])
    pixels(png(16, 16, bits=8, colour=2, rows=[b"\x80" * 48] * 16, before=chunk(b"cICP", bytes([1, 13, 0, 1]))))


# Damage


def test_a_png_whose_pixels_end_early_is_refused_though_every_chunk_is_whole() -> None:
    assert "ends after" in reason(png(16, 16, bits=8, colour=2, rows=[b"\x80" * 48] * 8))
    assert (pixels(png(16, 16, bits=8, colour=2, rows=[b"\x80" * 48] * 15 + [bytes(48)]))[-1] == 0).all()


@pytest.mark.parametrize("progressive", [False, True])
def test_a_jpeg_cut_in_the_middle_is_refused_even_with_an_end_marker(progressive: bool) -> None:
    whole = encoded(NOISE, "JPEG", progressive=progressive)
    assert "premature end" in reason(whole[: len(whole) // 2] + b"\xff\xd9")
    pixels(whole + b"padding" * 20)
    pixels(whole + whole)  # several pictures in one file: the first
    pixels(whole[:-2] + bytes(20) + b"\xff\xd9")  # as some cameras write


def test_bytes_behind_the_end_of_a_picture_do_no_harm() -> None:
    for kind in ("PNG", "GIF", "BMP"):
        image = NOISE.quantize() if kind == "GIF" else NOISE
        assert np.array_equal(pixels(encoded(image, kind) + b"garbage" * 100), pixels(encoded(image, kind)))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "JPEG2000", "AVIF"])
def test_wherever_a_file_is_cut_it_is_refused_or_all_its_pixels_are_there(kind: str) -> None:
    whole = encoded(NOISE.quantize() if kind == "GIF" else NOISE, kind)
    expected = pixels(whole)
    for end in (*np.linspace(1, len(whole) - 12, 12).astype(int), *range(len(whole) - 11, len(whole))):
        try:
            found = pixels(whole[:end])
        except DataError:
            continue
        assert np.array_equal(found, expected)


# Hostile


def test_text_and_profiles_that_inflate_to_gigabytes_are_refused() -> None:
    deflate = zlib.compressobj(9)
    bomb = b"".join(deflate.compress(bytes(1 << 20)) for _ in range(1000)) + deflate.flush()
    tracemalloc.start()
    for part in (
        chunk(b"iCCP", b"x\0\0" + bomb),
        chunk(b"zTXt", b"x\0\0" + bomb),
        chunk(b"iTXt", b"x\0\1\0\0\0" + bomb),
    ):
        assert "too large" in reason(png(16, 16, bits=8, colour=2, rows=[b"\x80" * 48] * 16, before=part))
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()


def test_sizes_of_nothing_and_of_too_much_are_refused() -> None:
    assert "damaged" in reason(png(0, 16, bits=8, colour=2, rows=[b""] * 16))
    assert "67,108,864" in reason(tiff(16000, 16000, bytes(300), bits=8, photometric=2, samples=3))
    assert "truncated" in reason(tiff(4000, 4000, bytes(300), bits=8, photometric=2, samples=3))


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"\0\0\0\x18ftypheic", "HEIC"), (b"\0\0\0\x18ftypmif1", "HEIC"), (b"\0\0\0\x18ftypmp42", "video"),
        (b"\xff\x0a", "JPEG XL"), (b"8BPS\0\1", "Photoshop"), (b"PK\x03\x04", "ZIP"), (b"\x1a\x45\xdf\xa3", "video"),
    ],
)  # fmt: skip
def test_other_formats_are_named_with_what_to_do(content: bytes, what: str) -> None:
    assert what in reason(content.ljust(300, b"\0"))


def test_a_jpeg_of_12_bits_is_refused() -> None:
    content = bytearray(encoded(NOISE, "JPEG"))
    content[content.index(b"\xff\xc0") + 4] = 12
    assert "a.png" in reason(bytes(content))


# Masks


def test_masks_are_grey_upright_and_black_where_transparent() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    mask = Image.new("LA", (32, 16), (255, 255))
    mask.paste((255, 0), (0, 0, 16, 16))
    found = load_mask(held(encoded(mask, "PNG", exif=exif)))
    assert (found.mode, found.size) == ("L", (16, 32))
    assert np.asarray(found)[:16].max() == 0
    assert np.asarray(found)[16:].min() == 255
    assert (
        np.asarray(load_mask(held(encoded(Image.new("L", (16, 16), 64), "PNG", icc_profile=grey_profile()))))[0, 0]
        == 64
    )
    assert np.asarray(load_mask(held(encoded(Image.new("1", (16, 16), 1), "PNG")))).min() == 255
    assert np.asarray(load_mask(held(encoded(Image.new("RGB", (16, 16), (255, 0, 0)), "PNG"))))[0, 0] == 76
    assert np.asarray(load_mask(held(encoded(Image.new("L", (16, 16)), "PNG")))).max() == 0


def test_a_map_of_labels_is_no_mask() -> None:
    labels = Image.new("L", (16, 16))
    labels.paste(1, (0, 0, 8, 8))
    with pytest.raises(DataError, match=r"a\.png.*labels"):
        load_mask(held(encoded(labels, "PNG")))


# Large pictures


def test_a_large_picture_is_converted_band_by_band_to_the_same_pixels() -> None:
    values = np.random.default_rng(1).integers(0, 256, (1500, 1600, 4), dtype=np.uint8)
    content = encoded(Image.fromarray(values), "PNG", compress_level=1)
    found = np.asarray(load_picture(held(content)))
    for top in (0, 650, 655, 1400):  # bands are of 655 rows
        part = Image.fromarray(values[top : top + 40])
        assert np.array_equal(found[top : top + 40], np.asarray(load_picture(held(encoded(part, "PNG")))))


def test_what_is_visible_only_in_a_later_band_is_visible() -> None:
    image = Image.new("RGBA", (1600, 1500))
    image.putpixel((5, 1490), (0, 0, 0, 255))
    assert load_picture(held(encoded(image, "PNG"))).getpixel((5, 1490)) == (0, 0, 0)
    with pytest.raises(DataError, match="transparent everywhere"):
        load_picture(held(encoded(Image.new("RGBA", (1600, 1500)), "PNG")))


def test_there_is_one_decoder() -> None:
    """Nothing in the package opens pictures of users with Pillow itself, which has other rules."""
    package = CASES.parents[2] / "qwen_edit_zero"
    allowed = {"edit_data/pictures/decode.py", "training/report/contact_sheet.py"}  # the latter reads our own PNGs
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if "Image.open(" in path.read_text(encoding="utf-8")
    }
    assert found <= allowed


def test_io_is_not_kept_open() -> None:
    buffer = io.BytesIO(encoded(NOISE, "PNG"))
    image = load_picture(held(buffer.getvalue()))
    buffer.close()
    assert image.tobytes() == NOISE.tobytes()


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "JPEG2000"])
def test_the_size_of_a_picture_costs_its_header_only(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """WebP and AVIF are read whole: Pillow's decoders want it so."""
    large = Image.fromarray(np.random.default_rng(2).integers(0, 256, (700, 900, 3), dtype=np.uint8))
    content = encoded(large.quantize() if kind == "GIF" else large, kind)
    read: list[int] = []

    class Counted(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            found = super().read(size)
            read.append(len(found))
            return found

    file = held(content)
    monkeypatch.setattr(type(file), "open", lambda self: Counted(self.content))
    assert picture_size(file) == (900, 700)
    assert sum(read) < 20_000 < len(content)
