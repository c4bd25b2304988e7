"""Pictures, manifests and cache entries for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

from qwen_edit_zero.edit_data.cache.store import CachedSample

CASES = Path(__file__).parent / "cases"  # odd inputs from the field


def quadrants(width: int = 48, height: int = 32) -> Image.Image:
    """Four coloured quadrants with a white mark top left: shows turning, mirroring and swapped channels."""
    image = Image.new("RGB", (width, height))
    draw = ImageDraw.Draw(image)
    w, h = width // 2, height // 2
    for x, y, colour in ((0, 0, "#dc2828"), (w, 0, "#28c83c"), (0, h, "#3250dc"), (w, h, "#e6c828")):
        draw.rectangle((x, y, x + w, y + h), fill=colour)
    draw.rectangle((0, 0, 3, 3), fill="white")
    return image


def save(path: Path, size: tuple[int, int] = (48, 32), **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    quadrants(*size).save(path, **options)
    return path


def write_manifest(folder: Path, rows: list[dict[str, Any]], name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


def row(number: int, references: int = 1, **more: Any) -> dict[str, Any]:
    sources = [f"s{number}_{i}.png" for i in range(references)]
    return {"id": f"a{number}", "source": sources, "target": f"t{number}.png", "instruction": f"改成 {number}", **more}


def save_pictures(folder: Path, rows: list[dict[str, Any]]) -> None:
    """A different picture for every name in the rows."""
    for i, r in enumerate(rows):
        for j, name in enumerate([*([r["source"]] if isinstance(r["source"], str) else r["source"]), r["target"]]):
            image = quadrants()
            image.putpixel((20, 20), (i, j, 7))
            image.save(folder / name)


def entry(seed: int, tokens: int = 5, references: int = 1, dtype: torch.dtype = torch.bfloat16) -> CachedSample:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    return CachedSample(draw(16, 4, 6), tuple(draw(16, 4, 4 + 2 * i) for i in range(references)), draw(tokens, 8))
