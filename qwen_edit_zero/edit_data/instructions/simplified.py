"""Traditional to simplified characters, by OpenCC."""

from __future__ import annotations

import re
from functools import cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opencc import OpenCC

_KANA = re.compile(r"[\u3041-\u30ff\u31f0-\u31ff]")
_HAN_BLOCKS = ((0x3400, 0x4DC0), (0x4E00, 0xA000), (0xF900, 0xFB00), (0x20000, 0x2A6E0))


@cache
def _converter() -> OpenCC:
    from opencc import OpenCC

    return OpenCC("t2s")


def simplified(text: str) -> str:
    """`text` in simplified characters, phrases considered (乾隆 keeps its 乾); Japanese, told by kana, as it is."""
    if text.isascii() or _KANA.search(text):
        return text
    converted: str = _converter().convert(text)
    return converted


@cache
def simple_characters() -> dict[int, str]:
    """For `str.translate`: each traditional character by its most frequent simplified one, disregarding phrases."""
    all_han = [chr(code) for first, end in _HAN_BLOCKS for code in range(first, end)]
    converted = _converter().convert("\n".join(all_han)).split("\n")
    return {ord(old): new for old, new in zip(all_han, converted, strict=True) if old != new}
