"""Parts of an instruction that no rule may touch: texts to be written, titles, addresses.

They are masked, each by one private-use character, so that a pattern can move such a part but not look into it.
"""

from __future__ import annotations

import re

# Private-use characters of plane 16. If a text has some of its own, they are masked too, so none is confused.
FIRST_MASK = 0x10F000
MOST_MASKS = 0xF00
MASK = f"[{chr(FIRST_MASK)}-{chr(FIRST_MASK + MOST_MASKS - 1)}]"

_PAIRS = {"“": "”", "「": "」", "『": "』", "《": "》", "〈": "〉", "«": "»", "‘": "’", '"': '"', "`": "`", "＂": "＂"}

# Words after which unquoted text to be written follows, up to the end of the sentence or the next order.
_WRITING = re.compile(
    r"""(?:写(?:上|着|有|成|下)?(?!实|真|意|生|字楼)|[印刻](?:上|着)|字样|字幕|
    (?:文字|文本|文案|标题|标语|口号|内容|字)(?:是|为|改为|改成|换成|变成|：|:)|署名(?:为)?|名(?:字)?(?:叫|为|是)|叫做|
    \b(?:that\ (?:says?|reads?)|saying|reading|with\ the\ (?:text|words?|letters|caption|title|slogan|name)|the\ words?|
    text:|(?:write|print|engrave|spell)s?|caption(?:ed)?|titled|named|labell?ed|called|to\ say)\b(?:\ ?:)?)
    \s*(?P<text>(?![“"「『'‘《«`])[^\s。！？；;\n，,][^。！？；;\n]*?)
    (?=$|[。！？；;\n]|[，,]\s*(?:[把将再并请去删移加添换改]|然后|同时|
    (?:change|turn|make|remove|add|replace|keep|and|then)\b))""",
    re.VERBOSE | re.IGNORECASE,
)  # fmt: skip
_IN_NAMES = "A-Za-z0-9_Ａ-Ｚａ-ｚ０-９"
_PLAIN = re.compile(
    rf"""(?P<own>{MASK})
    |(?:https?://|www\.)[^\s，。；！？]+
    |[A-Za-z0-9_.+-]+@[A-Za-z0-9-]+(?:\.[A-Za-z0-9-]+)+
    |(?<!\w)[@#][\w-]+
    |(?<![{_IN_NAMES}.])[{_IN_NAMES}-]+\.(?:jpe?g|png|webp|gif|bmp|tiff?|psd|svg|pdf|mp4|html?|com|org|net|cn|io)(?![A-Za-z0-9])""",
    re.VERBOSE | re.IGNORECASE,
)


def protected_spans(text: str) -> list[tuple[int, int]]:
    """Start and end of every part that must stay byte for byte, in order, not overlapping.

    Quotations with their quotes (“”, ‘’, 「」, 『』, 《》, «», straight and back quotes; one that is never closed goes
    to the end), text to be written after words such as 写上 or "saying", URLs, addresses, file names, @ and # names.
    """
    spans: list[tuple[int, int]] = []
    i = 0
    while i < len(text):
        close = _PAIRS.get(text[i])
        if close is None and text[i] == "'" and not (i and text[i - 1].isalnum() and text[i - 1].isascii()):
            found = re.compile(r"'[^'\n]*'(?![A-Za-z])").match(text, i)  # not an apostrophe
            if found:
                spans.append(found.span())
                i = found.end()
                continue
        if close is None:
            i += 1
            continue
        end = _closing(text, i, close)
        spans.append((i, end))
        i = end
    spans += [found.span("text") for found in _WRITING.finditer(text)]
    spans += [found.span() for found in _PLAIN.finditer(text)]
    return _merged(spans)


def _closing(text: str, start: int, close: str) -> int:
    """Behind the quote that closes the one at `start`, those of the same kind inside it counted; else the end."""
    depth = 0
    opening = text[start]
    for i in range(start, len(text)):
        if text[i] == close and (depth or i > start):
            depth -= 1
            if depth <= 0:
                return i + 1
        elif text[i] == opening:
            depth += 1
    return len(text)


def _merged(spans: list[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        elif end > start:
            merged.append((start, end))
    return merged


def masked(text: str) -> tuple[str, list[str]]:
    """`text` with each protected part as one private-use character, and the parts; see `unmasked`.

    A text with more than MOST_MASKS parts becomes one part as a whole.
    """
    spans = protected_spans(text)
    if len(spans) > MOST_MASKS:
        spans = [(0, len(text))]
    pieces, parts, position = [], [], 0
    for i, (start, end) in enumerate(spans):
        pieces += [text[position:start], chr(FIRST_MASK + i)]
        parts.append(text[start:end])
        position = end
    return "".join([*pieces, text[position:]]), parts


def unmasked(text: str, parts: list[str]) -> str:
    """The counterpart of `masked`."""
    return re.sub(MASK, lambda found: parts[ord(found[0]) - FIRST_MASK], text) if parts else text
