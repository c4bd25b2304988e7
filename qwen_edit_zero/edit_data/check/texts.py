"""What is told of an instruction by looking at it: its language, whether it has words, about how long it is."""

from __future__ import annotations

import re

LANGUAGES = ("zh", "en", "mixed", "other", "none")
TOKEN_LIMIT = 1024  # of an instruction; `tokenizer_max_length` of diffusers' pipelines
_QUOTED = re.compile(r"“[^”]*”|‘[^’]*’|「[^」]*」|『[^』]*』|《[^》]*》|\"[^\"]*\"|(?<!\w)'[^']*'(?!\w)|`[^`]*`")
_HAN = re.compile(r"[\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af]")
_LATIN = re.compile(r"[A-Za-z]{2,}|(?<![A-Za-z])[aAI](?![A-Za-z])")
_OTHER = re.compile(r"[^\W\d_A-Za-z\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U000323af]")


def language_of(text: str) -> int:
    """The number in `LANGUAGES`: of the words outside of quotations, if there are any."""
    bare = _QUOTED.sub(" ", text)
    if not any(character.isalpha() for character in bare):
        bare = text
    if not any(character.isalpha() for character in bare):
        return LANGUAGES.index("none")
    han, latin = _HAN.search(bare) is not None, _LATIN.search(bare) is not None
    # Kana and hangul, or more letters of other scripts than accents would make
    if len(_OTHER.findall(bare)) * 4 > sum(character.isalpha() for character in bare):
        return LANGUAGES.index("other")
    if han and latin:
        return LANGUAGES.index("mixed")
    return LANGUAGES.index("zh" if han else "en" if latin else "other")


def estimated_tokens(text: str) -> int:
    """About how many tokens a text has: one for each Chinese character, one for four others."""
    han = len(_HAN.findall(text))
    return han + (len(text) - han + 3) // 4
