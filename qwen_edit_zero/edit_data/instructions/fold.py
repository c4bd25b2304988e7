"""Views of a text in which disguised spellings look alike, each character knowing where in the text it came from.

folded     full width, ligatures, letter case, accents, look-alikes of other scripts and traditional characters undone;
           invisible characters gone
plain      folded, and letters set apart (n u d e, n.u.d.e) joined, digits and signs for letters (nud3) undone
compact    folded, and whatever stands between two Chinese characters gone, unless it ends a sentence
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from qwen_edit_zero.edit_data.instructions.simplified import simple_characters

HAN = r"\u3400-\u9fff\U00020000-\U0002a6df"
# Letters of Cyrillic, Greek and others that are read as Latin ones, after case folding.
_LOOK_ALIKES = str.maketrans(
    "авгеёзікмнопрстухѕјһԁԛԝүґьαβγεηικνορτυχωϲϳσδμıɑɡɩʟʀɴʜᴀᴄᴅᴇᴊᴋᴍᴏᴘᴛᴜᴠᴡᴢꜱɪɢʙʏ",
    "abree3ikmhonpctyxsjhdqwyrbabyenikvoptuxwcjoduiagilrnhacdejkmoptuvwzsigby",
)
_LEET = str.maketrans("013457@$!|+", "oieastasiit")
_SET_APART = re.compile(r"(?<![a-z0-9])(?:[a-z0-9@$!|][^a-z0-9\u3400-\u9fff]{1,3}){2,}[a-z0-9@$!|](?![a-z0-9])")
_INSIDE = re.compile(r"(?<=[a-z0-9])[._*~'`^=|/\\#·•-]{1,3}(?=[a-z0-9])")
_BLANK = re.compile(r"[^a-z0-9@$!|+]+")
_WORD = re.compile(r"[a-z0-9@$!|+]+")
_BETWEEN_HAN = re.compile(rf"(?<=[{HAN}])(?:[^\w。!?;\n]|_)+(?=[{HAN}])")


@dataclass(frozen=True)
class View:
    """A text made of another one; `source[i]` is the index there of what became character i."""

    text: str
    source: Sequence[int]

    def without(self, pattern: re.Pattern[str], inside: re.Pattern[str] | None = None) -> View:
        """The view without what `pattern` matches; with `inside`, only where that matches."""
        spans = [(0, len(self.text))] if inside is None else [found.span() for found in inside.finditer(self.text)]
        cut = [found.span() for start, end in spans for found in pattern.finditer(self.text, start, end)]
        if not cut:
            return self
        kept: list[int] = []
        position = 0
        for start, end in cut:
            kept += range(position, start)
            position = end
        kept += range(position, len(self.text))
        return View("".join(self.text[i] for i in kept), [self.source[i] for i in kept])

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Where in the source the characters from `start` to `end` come from."""
        return self.source[start], self.source[end - 1] + 1


def folded(text: str) -> View:
    """See the head of this file."""
    if text.isascii():
        return View(text.lower(), range(len(text)))
    pieces = [_folded_character(character) for character in text]
    return View("".join(pieces), [i for i, piece in enumerate(pieces) for _ in piece])


def plain(view: View) -> View:
    """The plain view of a folded one."""
    joined = view.without(_BLANK, inside=_SET_APART).without(_INSIDE)

    def letters(found: re.Match[str]) -> str:
        word = found[0]
        return word if word.isalpha() or not re.search("[a-z]", word) else word.translate(_LEET)

    return View(_WORD.sub(letters, joined.text), joined.source)


def compact(view: View) -> View:
    """The compact view of a folded one."""
    return view.without(_BETWEEN_HAN)


@lru_cache(maxsize=1 << 16)
def _folded_character(character: str) -> str:
    if unicodedata.category(character) in ("Cf", "Mn", "Me"):
        return ""
    if "\U0001f1e6" <= character <= "\U0001f1ff":  # letters that make flags
        return chr(ord(character) - 0x1F1E6 + ord("a"))
    decomposed = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", character).casefold())
    bare = "".join(mark for mark in decomposed if unicodedata.category(mark) != "Mn")
    return bare.translate(_LOOK_ALIKES).translate(simple_characters())
