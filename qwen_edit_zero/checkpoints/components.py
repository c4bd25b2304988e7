"""The parts of a model folder that training does not change, put beside a consolidated transformer."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from qwen_edit_zero.checkpoints.disk import ChecksummedFile
from qwen_edit_zero.errors import ModelFolderError

Components = Literal["link", "copy", "none"]

LINKED_FROM = 64 * 2**20  # bytes; smaller files are always copied
_LEGAL = ("LICENSE", "NOTICE")
_INDEX = "model_index.json"
_COPIED_AT_ONCE = 2**20  # bytes


@dataclass(frozen=True)
class ComponentFile:
    """A file to bring: where it is, its relative path in the new folder, its bytes, and whether a link will do."""

    source: Path
    name: Path
    size: int
    by_link: bool


def plan_components(base: Path, near: Path, mode: Components) -> list[ComponentFile]:
    """model_index.json and every file of the components it names, but the transformer.

    `near` is an existing folder of the file system that will hold them.
    `link`: large files become hard links to those of `base` where both are on one file system (a text encoder of
    16 GB then takes no time and no space), copies otherwise. `copy`: always copies. `none`: nothing.
    Raises ModelFolderError if `base` lacks a component it names, or a file cannot be read.
    """
    if mode == "none":
        return []
    try:
        names = [Path(_INDEX)]
        names += [Path(p.name) for p in base.iterdir() if p.name.upper().startswith(_LEGAL) and p.is_file()]
        for name in component_names(base):
            if not (base / name).is_dir():
                raise ModelFolderError(f"{base} names the component {name} in {_INDEX}, but has no folder {name}")
            names += [path.relative_to(base) for path in _files(base / name)]
        device = near.stat().st_dev if mode == "link" else None
        return [_plan((base / name).resolve(strict=True), name, device) for name in names]
    except OSError as error:
        raise ModelFolderError(f"cannot read {error.filename or base}: {error.strerror}") from error


def bytes_to_copy(files: Sequence[ComponentFile]) -> int:
    """What they take on the disk, as far as can be told before."""
    return sum(file.size for file in files if not file.by_link)


def add_components(files: Sequence[ComponentFile], out: Path) -> None:
    """Bring them. Raises OSError naming the file that could not be read or written."""
    for file in files:
        target = out / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        if file.by_link:
            with contextlib.suppress(OSError):  # a file system without links
                os.link(file.source, target)
                continue
        _copy(file.source, target)


def component_names(base: Path) -> list[str]:
    """Components that model_index.json names, without the transformer."""
    index = json.loads((base / _INDEX).read_text(encoding="utf-8"))
    named = [k for k, v in index.items() if isinstance(v, list) and len(v) == 2 and v[1] is not None]
    return sorted(k for k in named if k != "transformer" and Path(k).name == k)


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.iterdir()):
        if path.name.startswith("."):
            continue
        if path.is_dir():
            yield from _files(path)
        else:
            yield path


def _plan(source: Path, name: Path, device: int | None) -> ComponentFile:
    stat = source.stat()
    return ComponentFile(source, name, stat.st_size, stat.st_size >= LINKED_FROM and stat.st_dev == device)


def _copy(source: Path, target: Path) -> None:
    buffer = memoryview(bytearray(_COPIED_AT_ONCE))
    with source.open("rb", buffering=0) as read, ChecksummedFile(target) as written:
        while count := _fill(read.fileno(), buffer, source):
            written.write(buffer[:count])


def _fill(fd: int, buffer: memoryview, path: Path) -> int:
    try:
        return os.readv(fd, [buffer])
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
