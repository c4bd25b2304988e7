"""Files that ship with the package: the tiny model's template, the demo data and a font with Chinese characters."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

_ROOT = Path(__file__).resolve().parent


def asset_path(name: str) -> Path:
    """Absolute path of the shipped file or folder `name` (relative, with forward slashes).

    Raises:
        FileNotFoundError: the package was installed without it.
    """
    path = _ROOT / name
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing: the package was installed without its assets; reinstall it")
    return path


def cjk_font_path() -> Path:
    """A TrueType font with ASCII, punctuation, kana and the 3,755 most frequent Chinese characters."""
    return asset_path("fonts/WenQuanYiMicroHei-subset.ttf")


def demo_manifest(split: Literal["train", "validation"]) -> Path:
    """The demo data's JSONL manifest; the pictures' paths in it are relative to its folder."""
    return asset_path(f"demo/{split}.jsonl")
