"""Ways to hide a word from a filter: each disguise is a function of the word alone, so that runs can be compared."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from opencc import OpenCC


@cache
def _converter(kind: str) -> OpenCC:
    return OpenCC(kind)


_CYRILLIC = str.maketrans("aceopxyikmt", "асеорхуікмт")
_GREEK = str.maketrans("aeiknoptuvx", "αεικηορτυνχ")
_LEET = str.maketrans("aeiost", "431057")
_ACCENTS = str.maketrans("aeioun", "áèîõüñ")
_ENGLISH: dict[str, Callable[[str], str]] = {
    "plain": str,
    "capitals": str.upper,
    "blanks": " ".join,
    "points": ".".join,
    "hyphens": "-".join,
    "stars": "*".join,
    "underscores": "_".join,
    "one star": lambda word: word[:2] + "*" + word[2:],
    "full width": lambda word: "".join(chr(ord(c) + 0xFEE0) if "!" <= c <= "~" else c for c in word),
    "bold letters": lambda word: "".join(chr(0x1D41A + ord(c) - 97) if "a" <= c <= "z" else c for c in word),
    "circled letters": lambda word: "".join(chr(0x24D0 + ord(c) - 97) if "a" <= c <= "z" else c for c in word),
    "Cyrillic": lambda word: word.translate(_CYRILLIC),
    "Greek": lambda word: word.translate(_GREEK),
    "accents": lambda word: word.translate(_ACCENTS),
    "digits": lambda word: word.translate(_LEET),
    "signs": lambda word: word.replace("a", "@").replace("s", "$"),
    "repeated": lambda word: re.sub("([aeiou])", r"\1\1\1", word),
    "zero width": "\u200b".join,
    "soft hyphens": "\u00ad".join,
    "glued": lambda word: word.replace(" ", ""),
    "Cyrillic and points": lambda word: ".".join(word.translate(_CYRILLIC)),
    "digits and blanks": lambda word: " ".join(word.translate(_LEET)),
}
_CHINESE: dict[str, Callable[[str], str]] = {
    "plain": str,
    "blanks": " ".join,
    "wide blanks": "\u3000".join,
    "points": ".".join,
    "middle dots": "·".join,
    "stars": "*".join,
    "strokes": "/".join,
    "commas": "，".join,
    "zero width": "\u200b".join,
    "emoji": "😀".join,
    "traditional": lambda word: str(_converter("s2t").convert(word)),
    "traditional and stars": lambda word: "*".join(str(_converter("s2tw").convert(word))),
}


def _pinyin(word: str, *, tones: bool) -> list[str]:
    from pypinyin import Style, lazy_pinyin

    return list(lazy_pinyin(word, style=Style.TONE if tones else Style.NORMAL, v_to_u=tones))


_PINYIN: dict[str, Callable[[str], str]] = {
    "pinyin": lambda word: "".join(_pinyin(word, tones=False)),
    "pinyin with blanks": lambda word: " ".join(_pinyin(word, tones=False)),
    "pinyin with tones": lambda word: " ".join(_pinyin(word, tones=True)),
    "pinyin in capitals": lambda word: "".join(_pinyin(word, tones=False)).upper(),
    "last in pinyin": lambda word: word[:-1] + _pinyin(word, tones=False)[-1],
    "first in pinyin": lambda word: _pinyin(word, tones=False)[0] + word[1:],
}
# Misspellings that no rule undoes; here so that nobody takes the filter for more than it is
BEYOND: dict[str, Callable[[str], str]] = {
    "two letters swapped": lambda word: word[:1] + word[2] + word[1] + word[3:],
    "one letter left out": lambda word: word[:2] + word[3:],
    "vowels left out": lambda word: re.sub("(?<=.)[aeiou]", "", word),
    "said in other words": lambda word: "wearing what she had on at birth",
}
_HAN = re.compile("[\u3400-\u9fff]")


def disguised(word: str, *, pinyin: bool = True) -> dict[str, str]:
    """The word in every disguise of its script, by name, those that change nothing left out; `pinyin`: those too."""
    ways = (_CHINESE | _PINYIN if pinyin else _CHINESE) if _HAN.search(word) else _ENGLISH
    made = {name: way(word.lower()) for name, way in ways.items()}
    return {name: text for name, text in made.items() if name == "plain" or text != word}


def in_a_sentence(word: str) -> str:
    """The word as part of an instruction in its language."""
    return f"请把图1改成 {word} 的样子" if _HAN.search(word) else f"please change picture 1 to {word} in this style"
