"""What instructions the text encoder takes: one rule for encoding and for `data check`. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from qwen_edit_zero.errors import DataError

MOST_TOKENS = 1024  # `tokenizer_max_length` of diffusers' pipelines; see the test


class Tokenizer(Protocol):
    """What is needed of transformers' tokenizers."""

    def __call__(self, text: str, /) -> Mapping[str, Sequence[int]]: ...
    def get_added_vocab(self) -> Mapping[str, int]: ...


class InstructionLimit:
    """Raises DataError for instructions that cannot be encoded."""

    def __init__(self, tokenizer: Tokenizer, most_tokens: int = MOST_TOKENS) -> None:
        self._tokenizer, self._most = tokenizer, most_tokens
        self._markup = tuple(token for token in tokenizer.get_added_vocab() if token.startswith("<|"))

    def check(self, instruction: str) -> int:
        """The number of tokens. Raises DataError for an instruction that is too long or holds chat markup."""
        markup = [token for token in self._markup if token in instruction]
        if markup:
            raise DataError(
                f"the instruction {instruction[:60]!r} contains the chat markup {markup[0]}, which would end the "
                "user's turn or stand for a picture; remove it"
            )
        tokens = len(self._tokenizer(instruction)["input_ids"])
        if tokens > self._most:
            raise DataError(
                f"the instruction {instruction[:60]!r}... has {tokens} tokens; the model takes at most {self._most}. "
                "Shorten it"
            )
        return tokens


def instruction_limit_of(model: Path) -> InstructionLimit:
    """The limit of a model folder, by its tokenizer, which takes a second or two to load."""
    from transformers import Qwen2Tokenizer

    tokenizer: Any = Qwen2Tokenizer.from_pretrained(model / "tokenizer", local_files_only=True)
    return InstructionLimit(tokenizer)
