"""Chat markup in user text, made harmless: the tokenizer would read it as the end of the turn or as a picture."""

from __future__ import annotations

import re
from collections.abc import Callable

from qwen_edit_zero.edit_data.instructions.changes import Change

MARKUP_RULE, LABEL_RULE = "chat-markup", "picture-label"

# The tokens added to Qwen's vocabulary have one of two forms. `<|name|>` covers all of its releases, those to come too.
_MARKUP = re.compile(r"<(\|[^\s<>|]+\||/?(?:tool_call|tool_response|think))>")
# The template writes `Picture 1: ` before each picture, exactly so; the same in an instruction would name another.
_LABEL = re.compile(r"(Picture \d+):")


def neutralise(text: str) -> tuple[str, list[Change]]:
    """Take the effect from chat markup and picture labels, visibly, keeping every character of the text.

    `<|im_end|>` becomes `<| im_end |>`, `</tool_call>` becomes `< /tool_call >`, and `Picture 1:` becomes
    `Picture 1 :`. Applying it again changes nothing.

    Returns:
        The text, and its changes (see `undo`).
    """
    changes: list[Change] = []
    if "<" in text:
        text = _replace(MARKUP_RULE, _MARKUP, _opened, text, changes)
    if "Picture " in text:
        text = _replace(LABEL_RULE, _LABEL, lambda found: f"{found[1]} :", text, changes)
    return text, changes


def _opened(found: re.Match[str]) -> str:
    inner = found[1]
    return f"<| {inner[1:-1]} |>" if inner.startswith("|") else f"< {inner} >"


def _replace(
    rule: str, pattern: re.Pattern[str], replacement: Callable[[re.Match[str]], str], text: str, changes: list[Change]
) -> str:
    pieces, position, shift = [], 0, 0
    for found in pattern.finditer(text):
        after = replacement(found)
        changes.append(Change(rule, found.start() + shift, found[0], after))
        pieces += [text[position : found.start()], after]
        position = found.end()
        shift += len(after) - len(found[0])
    return "".join([*pieces, text[position:]])
