"""Text of any script on a picture: a chain of fonts that finds each character, and wrapping that knows Chinese."""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from PIL import ImageDraw, ImageFont

from qwen_edit_zero.assets import cjk_font_path

_FONT_FOLDERS = ("/usr/share/fonts", "/usr/local/share/fonts", "~/.local/share/fonts", "~/.fonts", "/Library/Fonts")
_CJK_FONT = re.compile(r"cjk|notosans(sc|tc|jp|kr)|sourcehan|wqy|wenquanyi|simhei|simsun|pingfang|uming|ukai", re.I)
_WIDE = r"\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef"  # breaks between any two of these
_PIECE = re.compile(rf"\s*(?:[{_WIDE}]|[^\s{_WIDE}]+)|\s+$")
_NO_LINE_START = set("、。，．！？：；）》」』】〉…”’%,.!?:;)]}")
_NO_LINE_END = set("（《「『【〈“‘([{")


@dataclass(frozen=True)
class Font:
    """Draws and measures text at one size in pixels; a character that no font has is written as its code point."""

    size: int

    def length(self, text: str) -> float:
        """Width of one line of text in pixels."""
        return sum(font.getlength(run) for font, run in self._runs(text))

    def draw(self, canvas: ImageDraw.ImageDraw, at: tuple[float, float], text: str, colour: str) -> None:
        """Draw one line of text; `at` is the left end of its baseline."""
        x, y = at
        for font, run in self._runs(text):
            canvas.text((x, y), run, fill=colour, font=font, anchor="ls")
            x += font.getlength(run)

    def wrap(self, text: str, width: float, *, most: int = 100) -> list[str]:
        """Lines no wider than `width` pixels, at most `most` of them, the last ending in … if text is left over.

        Western text breaks between words, Chinese and Japanese between characters, but not before closing or after
        opening punctuation; what is wider than a line breaks anywhere.
        """
        lines: list[str] = []
        for paragraph in text.splitlines() or [""]:
            line = ""
            for piece in _pieces(paragraph):
                if not line or self.length((line + piece).rstrip()) <= width:
                    line += piece if line else piece.lstrip()
                else:
                    lines.append(line.rstrip())
                    line = piece.lstrip()
                while self.length(line.rstrip()) > width and len(line) > 1:
                    cut = len(line) - 1
                    while cut > 1 and self.length(line[:cut]) > width:
                        cut -= 1
                    lines.append(line[:cut])
                    line = line[cut:]
            lines.append(line.rstrip())
        if len(lines) <= most:
            return lines
        last = lines[most - 1]
        while last and self.length(last + "…") > width:
            last = last[:-1]
        return [*lines[: most - 1], last + "…"]

    def _runs(self, text: str) -> Iterator[tuple[ImageFont.FreeTypeFont, str]]:
        """The text in stretches of one font each."""
        current: Path | None = None
        run = ""
        for character, path in _with_fonts(text):
            if path != current and current is not None:
                yield _load(current, self.size), run
                run = ""
            current = path
            run += character
        if current is not None:
            yield _load(current, self.size), run


def has_glyph(font: Path, character: str) -> bool:
    """Whether the font has a glyph of its own for the character."""
    return ord(character) in _characters(font)


def _with_fonts(text: str) -> Iterator[tuple[str, Path]]:
    for character in text:
        category = unicodedata.category(character)
        if category == "Cf" or "\ufe00" <= character <= "\ufe0f":
            continue  # joiners and variation selectors show nothing
        if category == "Zs" or character == "\t":
            character = " "
        path = _font_of(character)
        if path is None:
            yield from ((c, cjk_font_path()) for c in f"[U+{ord(character):04X}]")
        else:
            yield character, path


@functools.lru_cache(maxsize=65536)
def _font_of(character: str) -> Path | None:
    """The first font that has the character: the shipped one, matplotlib's, then what the system has."""
    for path in _shipped_fonts():
        if has_glyph(path, character):
            return path
    return next((path for path in _system_fonts() if has_glyph(path, character)), None)


@functools.cache
def _shipped_fonts() -> tuple[Path, ...]:
    import matplotlib

    return cjk_font_path(), Path(matplotlib.get_data_path()) / "fonts" / "ttf" / "DejaVuSans.ttf"


@functools.cache
def _system_fonts() -> tuple[Path, ...]:
    found = []
    for folder in _FONT_FOLDERS:
        for path in sorted(Path(folder).expanduser().rglob("*")):
            if path.suffix.lower() in (".ttf", ".otf", ".ttc") and _CJK_FONT.search(path.name):
                found.append(path)
    return tuple(found)


@functools.cache
def _characters(font: Path) -> frozenset[int]:
    from matplotlib.ft2font import FT2Font

    try:
        return frozenset(FT2Font(str(font)).get_charmap())
    except (OSError, RuntimeError):  # a system font that FreeType cannot open
        return frozenset()


@functools.lru_cache(maxsize=64)
def _load(path: Path, size: int) -> ImageFont.FreeTypeFont:
    return ImageFont.truetype(str(path), size)


def _pieces(text: str) -> list[str]:
    """Stretches that stay on one line: words with the spaces before them, single wide characters with punctuation."""
    pieces: list[str] = []
    for part in _PIECE.findall(text):
        if pieces and (part[0] in _NO_LINE_START or pieces[-1][-1] in _NO_LINE_END):
            pieces[-1] += part
        else:
            pieces.append(part)
    return pieces
