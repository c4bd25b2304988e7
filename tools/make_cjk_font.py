"""Cut the shipped font out of Debian's fonts-wqy-microhei (WenQuanYi Micro Hei, Apache-2.0).

    apt-get download fonts-wqy-microhei && dpkg-deb -x fonts-wqy-microhei_*.deb FOLDER
    python tools/make_cjk_font.py FOLDER/usr/share/fonts/truetype/wqy/wqy-microhei.ttc

Kept: ASCII, Latin-1, common punctuation and symbols, kana, full-width forms and GB2312 level 1 (the 3,755 most
frequent Chinese characters). Hints and layout tables are dropped.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from fontTools import subset
from fontTools.ttLib import TTFont
from fontTools.ttLib.scaleUpem import scale_upem

TARGET = Path(__file__).parent.parent / "qwen_edit_zero/assets/fonts/WenQuanYiMicroHei-subset.ttf"


def characters() -> set[int]:
    """Unicode code points to keep."""
    kept = set(range(0x20, 0x7F)) | set(range(0xA0, 0x100))
    kept |= set(range(0x2010, 0x2027)) | set(range(0x3000, 0x3016)) | set(range(0x3041, 0x3100))
    kept |= set(range(0xFF01, 0xFF5F)) | {0x20AC, 0x2103, 0x2116, 0x2122, *range(0x2190, 0x2194)}
    for row in range(16, 56):  # GB2312 level 1
        for cell in range(1, 95):
            try:
                kept.add(ord(bytes([0xA0 + row, 0xA0 + cell]).decode("gb2312")))
            except UnicodeDecodeError:
                continue
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path)
    parser.add_argument("--out", type=Path, default=TARGET)
    args = parser.parse_args()
    options = subset.Options(hinting=False, layout_features=[], name_IDs=[0, 1, 2, 4, 13, 14], notdef_outline=True)
    options.drop_tables += ["GSUB", "GPOS", "GDEF", "vhea", "vmtx"]
    font = TTFont(args.source, fontNumber=0)
    cutter = subset.Subsetter(options)
    cutter.populate(unicodes=characters())
    cutter.subset(font)
    scale_upem(font, 512)  # a finer grid than any screen size needs costs a fifth of the file
    args.out.parent.mkdir(parents=True, exist_ok=True)
    font.save(args.out)
    missing = [chr(c) for c in characters() if c not in font.getBestCmap()]
    print(f"{args.out}: {args.out.stat().st_size} bytes, {len(font.getBestCmap())} characters")
    print(f"not in the source: {''.join(missing)}")


if __name__ == "__main__":
    main()
