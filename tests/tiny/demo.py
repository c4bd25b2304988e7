"""Reading the demo manifests in tests, without the package's own reader."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from PIL import Image

from qwen_edit_zero.assets import demo_manifest


@dataclass(frozen=True)
class Triplet:
    """A row of a manifest with absolute paths."""

    id: str
    sources: tuple[Path, ...]
    instruction: str
    target: Path
    category: str

    def pictures(self) -> list[Image.Image]:
        """The decoded references."""
        return [Image.open(path).convert("RGB") for path in self.sources]


def read(split: Literal["train", "validation"]) -> list[Triplet]:
    """All rows of a split."""
    path = demo_manifest(split)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Triplet(
            row["id"],
            tuple(path.parent / s for s in ([row["source"]] if isinstance(row["source"], str) else row["source"])),
            row["instruction"],
            path.parent / row["target"],
            row["category"],
        )
        for row in rows
    ]
