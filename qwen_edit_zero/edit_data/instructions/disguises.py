"""Patterns that find a word in disguise: letters set apart, repeated, or replaced by digits and signs; pinyin.

They are searched in the folded and compact views of `fold`, which undo other disguises. Before that, `may_be_in` rules
out nearly all texts by a few substring searches.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

_LETTERS = {
    "a": "a4@",
    "b": "b8",
    "e": "e3",
    "g": "g9",
    "i": "i1!|",
    "l": "l1!|",
    "o": "o0",
    "s": "s5$",
    "t": "t7+",
    "v": "uv",
}
_INSIDE = r"[._*~'`^=/\\#·•-]{0,3}"  # between the letters of a word
_APART = r"[^a-z0-9\u3400-\u9fff]{1,3}"  # between letters that all are set apart, blanks too
_BETWEEN_WORDS = r"[\W_]{0,5}"
_BETWEEN_SYLLABLES = r"(?:[^\w。!?;\n]|_){0,3}"
# For the quick test, letters that one digit may stand for are one letter, as are u and v (nv for nü);
# and no letter is repeated.
_DIGITS = str.maketrans("01345789lv", "oieastbgiu")
_SIGNS = str.maketrans("@$!|+", "asiit")
_NOT_LETTERS = re.compile("[^a-z]+")
_REPEATED = re.compile(r"(.)\1+")


@dataclass(frozen=True)
class Word:
    """A word to search for: the letters it has in any disguise, or its Chinese characters and their pinyin."""

    source: str
    letters: str
    han: str = ""
    syllables: tuple[str, ...] = ()

    @cached_property
    def pattern(self) -> re.Pattern[str]:
        """To be searched; compiled when first needed, since most words never are."""
        return re.compile(self.source)

    def may_be_in(self, traces: Traces) -> bool:
        """Whether the pattern can match at all; never False if it does."""
        if self.letters and self.letters in traces.letters:
            return True
        if not self.han:
            return False
        if self.han in traces.compact:
            return True
        # Characters and pinyin mixed: every character is there, or its syllable
        return (
            traces.is_mixed
            and bool(self.syllables)
            and all(
                character in traces.compact or syllable in traces.compact
                for character, syllable in zip(self.han, self.syllables, strict=True)
            )
        )


class Traces:
    """What the quick test needs of a text."""

    def __init__(self, folded_text: str, compact_text: str) -> None:
        self.compact = compact_text
        # signs read as letters, and signs left out
        self.letters = f"{_skeleton(folded_text)}\n{_skeleton(folded_text.translate(_SIGNS))}"
        self.is_mixed = len(self.letters) > 1 and not compact_text.isascii()


def latin_word(text: str) -> Word:
    """A word or phrase in Latin letters, in folded spelling. Matches whole words only; a plural s may follow."""
    parts = [re.sub("[^a-z0-9]", "", part) for part in text.split()]
    parts = [part for part in parts if part]
    return Word(_latin_pattern(parts), _skeleton("".join(parts)))


def word_with_han(text: str, pinyin: str | None) -> Word:
    """A word with Chinese characters; found in pinyin, and in both mixed, if `pinyin` is given (`luo ti`)."""
    characters = "".join(text.split())
    if pinyin is None:
        return Word(re.escape(characters), "", characters)
    syllables = pinyin.split()
    steps = []
    for i, (character, syllable) in enumerate(zip(characters, syllables, strict=True)):
        before = "(?<![a-z])" if i == 0 else ""
        after = "(?![a-z])" if i == len(syllables) - 1 else ""
        steps.append(f"(?:{re.escape(character)}|{before}{syllable.replace('v', '[uv]')}{after})")
    joined = "".join(syllables)
    source = _BETWEEN_SYLLABLES.join(steps)
    if len(joined) >= 5:  # shorter ones are English words too often
        source += "|" + _latin_pattern([joined])
    return Word(source, _skeleton(joined), characters, tuple(syllable.partition("v")[0] for syllable in syllables))


def _latin_pattern(parts: list[str]) -> str:
    plural = "(?:[e3]?[s5$])?"
    in_words = _BETWEEN_WORDS.join(_INSIDE.join(_letter(c) + "+" for c in part) for part in parts)
    apart = _APART.join(_letter(c) for c in "".join(parts))
    return f"(?<![a-z])(?:{in_words}{plural}|{apart})(?![a-z])"


def _letter(character: str) -> str:
    choices = _LETTERS.get(character, character)
    return f"[{re.escape(choices)}]" if len(choices) > 1 else choices


def _skeleton(text: str) -> str:
    return _REPEATED.sub(r"\1", _NOT_LETTERS.sub("", text.translate(_DIGITS)))
