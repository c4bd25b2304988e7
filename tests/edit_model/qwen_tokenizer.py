"""The real Qwen tokenizer without a network: converts the vocabulary that the PyPI package `dashscope` ships.

`qwen.tiktoken` holds 151,643 byte strings with their ranks. A BPE tokenizer file wants the merges behind them: the two
parts of each token are what BPE makes of it with the lower ranks only.
"""

from __future__ import annotations

import base64
import importlib.util
import json
from pathlib import Path

from transformers import AddedToken, Qwen2Tokenizer

SPECIAL_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
    "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
    "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip


def qwen_ranks() -> dict[bytes, int]:
    """The real vocabulary: byte string -> rank, from dashscope's files (the package itself is not imported)."""
    spec = importlib.util.find_spec("dashscope")
    assert spec is not None, "dashscope is missing: pip install --no-deps dashscope"
    assert spec.submodule_search_locations is not None
    lines = (Path(spec.submodule_search_locations[0]) / "resources" / "qwen.tiktoken").read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines if line)}


def write_vocabulary(ranks: dict[bytes, int], folder: Path) -> None:
    """Write `vocab.json` and `merges.txt`."""
    letters = _byte_letters()
    spell = {token: "".join(letters[b] for b in token) for token in ranks}
    merges = [" ".join(spell[part] for part in _parts(ranks, t, r)) for t, r in ranks.items() if len(t) > 1]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({spell[t]: r for t, r in ranks.items()}), encoding="utf-8")
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n", encoding="utf-8")


def real_tokenizer(folder: Path, ranks: dict[bytes, int] | None = None) -> Qwen2Tokenizer:
    """The tokenizer of Qwen2.5-VL with its 14 special tokens; working files go to `folder`."""
    write_vocabulary(ranks or qwen_ranks(), folder)
    tokenizer = Qwen2Tokenizer(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    tokenizer.add_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.eos_token, tokenizer.pad_token = "<|im_end|>", "<|endoftext|>"
    return tokenizer


def _parts(ranks: dict[bytes, int], token: bytes, rank: int) -> list[bytes]:
    parts = [bytes([b]) for b in token]
    while True:
        pairs = [(ranks.get(parts[i] + parts[i + 1], rank), i) for i in range(len(parts) - 1)]
        best, i = min(pairs, default=(rank, 0))
        if best >= rank:
            assert len(parts) == 2, token
            return parts
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


def _byte_letters() -> dict[int, str]:
    """GPT-2's mapping of bytes to printable letters."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
