"""The parts of a model folder that training does not change, put beside a consolidated transformer."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Literal

from qwen_edit_zero.errors import ModelFolderError

Components = Literal["link", "copy", "none"]

LINKED_FROM = 64 * 2**20  # bytes; smaller files are always copied
_LEGAL = ("LICENSE", "NOTICE")


def add_components(base: Path, out: Path, mode: Components) -> None:
    """Bring model_index.json and every component it names, but the transformer, from `base` to `out`.

    `link`: large files become hard links to those of `base` where both are on one file system (a text encoder of
    16 GB then takes no time and no space), copies otherwise. `copy`: always copies. `none`: nothing is done.
    Raises ModelFolderError if `base` lacks a component it names, OSError if writing fails.
    """
    if mode == "none":
        return
    shutil.copyfile(base / "model_index.json", out / "model_index.json")
    for path in base.iterdir():
        if path.name.upper().startswith(_LEGAL) and path.is_file():
            shutil.copyfile(path, out / path.name)
    for name in component_names(base):
        if not (base / name).is_dir():
            raise ModelFolderError(f"{base} names the component {name} in model_index.json, but has no folder {name}")
        _bring_folder(base / name, out / name, link=mode == "link")


def component_names(base: Path) -> list[str]:
    """Components that model_index.json names, without the transformer."""
    index = json.loads((base / "model_index.json").read_text(encoding="utf-8"))
    named = [k for k, v in index.items() if isinstance(v, list) and len(v) == 2 and v[1] is not None]
    return sorted(k for k in named if k != "transformer" and Path(k).name == k)


def _bring_folder(source: Path, target: Path, *, link: bool) -> None:
    target.mkdir()
    for path in sorted(source.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            _bring_folder(path, target / path.name, link=link)
        else:
            _bring_file(path.resolve(strict=True), target / path.name, link=link)


def _bring_file(source: Path, target: Path, *, link: bool) -> None:
    if link and source.stat().st_size >= LINKED_FROM:
        try:
            os.link(source, target)
        except OSError:  # another file system, or one without links
            pass
        else:
            return
    shutil.copyfile(source, target)
