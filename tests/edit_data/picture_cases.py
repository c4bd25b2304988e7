"""The table of odd pictures: what must happen to each, and by which rule.

`python -m tests.edit_data.picture_cases docs/picture_cases.md` writes it with what does happen.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from qwen_edit_zero.edit_data.pictures.decode import load_picture, picture_size
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError
from tests.edit_data.builders import CASES

Check = Callable[[np.ndarray], bool]
CANONICAL = np.asarray(Image.open(CASES / "images/canonical_upright.png").convert("RGB")).astype(int)


def _canonical(found: np.ndarray) -> bool:
    return found.shape == CANONICAL.shape and float(np.abs(found - CANONICAL).mean()) < 12


def _exactly(found: np.ndarray) -> bool:
    return np.array_equal(found, CANONICAL)


def _levels(found: np.ndarray) -> bool:
    row = found[0, :, 0]
    return (row.min(), row.max(), len(np.unique(row))) == (0, 255, 256)


def _stored(name: str) -> np.ndarray:
    """What Pillow shows at once: the first frame, colours as they are stored."""
    with Image.open(CASES / "images" / name) as image:
        return np.asarray(image.convert("RGB")).astype(int)


def _sized(width: int, height: int) -> Check:
    return lambda found: found.shape == (height, width, 3)


@dataclass(frozen=True)
class Case:
    """`check` looks at the decoded pixels, int (H, W, 3); `refusal` is a part of the message. One of them is given."""

    file: str
    rule: str
    check: Check | None = None
    refusal: str | None = None


_EXIF = "EXIF orientation is applied once and is then gone"
_FORMAT = "by content, never by the ending"
_EMPTY = "empty and cut files are refused by name"

TABLE = (
    Case("images/canonical_upright.png", "nothing odd", _exactly),
    *(Case(f"images/exif_orientation_{i}.jpg", _EXIF, _canonical) for i in (2, 3, 4, 7, 8)),
    Case("images/exif_orientation_6.webp", _EXIF, _canonical),
    Case("images/exif_orientation_9_invalid.jpg", "a value that does not exist is upright", _canonical),
    Case("images/exif_corrupt.jpg", "broken EXIF is upright; pixels count", _canonical),
    Case("images/cmyk_adobe.jpg", "JPEG inks are inverted (Adobe)", _canonical),
    Case("images/cmyk_no_app14.jpg", "the same convention without the Adobe marker", _canonical),
    Case(
        "images/palette_trns_bytes.png", "palette alpha is blended on white",
        lambda found: bool((found >= CANONICAL - 1).all() and np.abs(found - CANONICAL).max() > 50),
    ),
    Case("images/rgb_trns_colorkey.png", "a colour key is transparent", lambda f: bool((f[8, 12] == 255).all())),
    Case("images/rgba_hidden_magenta.png", "alpha is blended on white", lambda f: bool((f[:, :20] == 255).all())),
    Case("images/rgba_fully_opaque.png", "opaque alpha changes nothing", _exactly),
    Case("images/gray_16bit_ramp.png", "16 bits: v >> 8", _levels),
    Case("images/gray_16bit_12bit_range.png", "16 bits: v >> 8, never stretched", lambda f: int(f.max()) == 4095 >> 8),
    Case(
        "images/rgb_16bit.png", "16 bits: v >> 8",
        lambda f: len(np.unique(f[0, :, 0])) == 256 and f[0, [0, -1, 0], [0, 0, 1]].tolist() == [0, 255, 255],
    ),
    Case("images/gray_16bit_bigendian.tif", "16 bits: v >> 8, in either byte order", _levels),
    Case("images/gray_float32.tif", "floats state no range", refusal="mode F"),
    Case(
        "images/icc_wide_gamut.png", "profiles are converted to sRGB",
        lambda found: bool(np.abs(found - _stored("icc_wide_gamut.png")).max() > 5),
    ),
    Case("images/animated_apng.png", "the first frame", lambda f: np.array_equal(f, _stored("animated_apng.png"))),
    Case(
        "images/animated_empty_first_frame.gif", "the first frame; nothing visible is refused",
        refusal="transparent everywhere",
    ),
    Case("images/phone_mpo.jpg", "the first picture of several", _canonical),
    Case("images/truncated_progressive.jpg", "the first picture must be whole", refusal="truncated"),
    Case("images/missing_last_2_bytes.jpg", "the end marker must be there", refusal="truncated"),
    Case("images/bad_crc.png", "checksums are compared", refusal="checksum of its IDAT"),
    Case("images/bit_rot.png", "checksums are compared", refusal="checksum of its IDAT"),
    Case("images/zero_byte.jpg", _EMPTY, refusal="empty"),
    Case("images/one_byte.png", _EMPTY, refusal="accepted format"),
    Case("images/jpeg_header_only.jpg", _EMPTY, refusal="Truncated"),
    Case("images/bomb_14000x14000_1bit.png", "pixels are counted from the header", refusal="14000 x 14000"),
    Case("images/bomb_10000x10000_1bit.png", "pixels are counted from the header", refusal="10000 x 10000"),
    Case("images/really_png.jpg", _FORMAT, _canonical),
    Case("images/really_webp.png", _FORMAT, _canonical),
    Case("images/really_svg.png", _FORMAT, refusal="SVG"),
    Case("images/UPPER.JPG", _FORMAT, _canonical),
    Case("images/double.png.jpg", _FORMAT, _canonical),
    Case("images/._hidden.png", "no picture, whatever its name", refusal="accepted format"),
    Case("images/Thumbs.db", "no picture", refusal="accepted format"),
    Case("images/photo.avif", "AVIF is accepted", _canonical),
    Case("images/photo.jp2", "JPEG 2000 is accepted", _canonical),
    Case("images/size_1x1.png", "each side at least 8 pixels", refusal="at least 8"),
    Case("images/size_4000x1.png", "each side at least 8 pixels", refusal="at least 8"),
    Case("images/size_17x31.png", "resized to multiples of 32, source and target alike", _sized(17, 31)),
    Case("images/size_8x2048.png", "no side over 200 times the other", refusal="200 times"),
    *(
        Case(f"names/{name}", "names are taken literally", lambda found: found.ndim == 3)
        for name in (
            "unicode_图片 编辑_пример_😀.png", "caf\u00e9_nfc.png", "cafe\u0301_nfd.png",
            "a b.png", "a,b.png", "a;b&c#d%20e?.png", "quote'\"x.png", "new\nline.png",
        )
    ),
    *(
        Case(f"pairs/{name}", "an ordinary picture; how files are paired is the manifest's part", lambda f: f.ndim == 3)
        for name in (
            "prefix/target/img01.png", "prefix/target/img010.png", "prefix/control1/img1.png", "same_stem/cat.jpg",
            "sizes/source_64x48.png", "noop/source.png", "noop/target.png", "five_refs/ref4.png",
            "five_refs/target.png", "rgba_target/source.png", "target_is_directory/source.png",
        )
    ),
    Case("pairs/same_stem/cat.txt", "no picture", refusal="accepted format"),
    Case("pairs/target_is_directory/target.png", "a folder is refused by name", refusal="folder"),
)  # fmt: skip


def outcome(case: Case, root: Path = CASES) -> str:
    """`right`, `wrong`, or `refused: why`."""
    path = root / case.file
    if case.file == "pairs/target_is_directory/target.png":
        path.mkdir(exist_ok=True)  # Git keeps no empty folders
    try:
        image = load_picture(path)
    except DataError as error:
        reason = str(error).removeprefix(f"picture {shown(path)}: ")
        return f"refused: {reason}" if reason != str(error) else "wrong"
    found = np.asarray(image).astype(int)
    right = image.mode == "RGB" and image.size == picture_size(path) and case.check is not None and case.check(found)
    return "right" if right else "wrong"


def document() -> str:
    """docs/picture_cases.md."""
    lines = [
        "# Odd pictures, and what happens to them", "",
        "Made by `python -m tests.edit_data.picture_cases docs/picture_cases.md` from what the decoder does with each",
        "file; the tests compare it with what must happen. The rules are those of [data.md](data.md#pictures).", "",
        "| file | outcome | rule |", "|---|---|---|",
    ]  # fmt: skip
    lines += [f"| `{shown(case.file)[1:-1]}` | {outcome(case)} | {case.rule} |" for case in TABLE]
    results = [outcome(case) for case in TABLE]
    right, wrong = results.count("right"), results.count("wrong")
    lines += ["", f"{right} right, {len(results) - right - wrong} refused by name and reason, {wrong} wrong."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(document(), encoding="utf-8")
