"""Sample pictures of a run on disk: `RUN/samples/step-00000200/`, one JSON file a held-out sample and PNGs beside it.

    007.json                {"id", "category", "instruction", "references": [...], "target": ... or null, "output"}
    007-reference-1.png     ... -reference-N.png, in the order of the manifest
    007-target.png
    007-output.png

The JSON file is written last, so that a sample of an interrupted run is either whole or not there.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

SAMPLES_FOLDER = "samples"

_STEP_FOLDER = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class SampleRecord:
    """A sample as it was saved; `target` is None where the held-out data has none. The files may have gone since."""

    id: str
    category: str | None
    instruction: str
    references: tuple[Path, ...]
    target: Path | None
    output: Path


def step_folder(run: Path, step: int) -> Path:
    """Where the sample pictures made after optimizer step `step` belong."""
    return run / SAMPLES_FOLDER / f"step-{step:08d}"


def save_sample(
    folder: Path,
    index: int,
    *,
    id: str,
    category: str | None,
    instruction: str,
    references: Sequence[Image.Image],
    target: Image.Image | None,
    output: Image.Image,
) -> Path:
    """Write one held-out sample into a step's folder, which is made if missing; returns its JSON file.

    Args:
        index: position among the step's samples, from 0; the rows of the contact sheet are in this order.
    """
    folder.mkdir(parents=True, exist_ok=True)

    def write(name: str, picture: Image.Image) -> str:
        file = f"{index:03d}-{name}.png"
        picture.save(folder / file)
        return file

    record: dict[str, Any] = {
        "id": id,
        "category": category,
        "instruction": instruction,
        "references": [write(f"reference-{i}", picture) for i, picture in enumerate(references, start=1)],
        "target": None if target is None else write("target", target),
        "output": write("output", output),
    }
    path = folder / f"{index:03d}.json"
    temporary = folder / f".{index:03d}.json.partial"
    temporary.write_text(json.dumps(record, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, path)
    return path


def read_samples(folder: Path) -> tuple[list[SampleRecord], list[Path]]:
    """The samples of a step's folder in order, and the JSON files that could not be understood."""
    records: list[SampleRecord] = []
    unreadable: list[Path] = []
    files = [path for path in folder.glob("*.json") if path.stem.isdecimal()]
    for path in sorted(files, key=lambda path: int(path.stem)):
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            target = record["target"]
            records.append(
                SampleRecord(
                    str(record["id"]),
                    record["category"],
                    str(record["instruction"]),
                    tuple(folder / name for name in record["references"]),
                    None if target is None else folder / target,
                    folder / record["output"],
                )
            )
        except (OSError, ValueError, KeyError, TypeError):
            unreadable.append(path)
    return records, unreadable


def step_folders(run: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every step that sample pictures were made at, oldest first."""
    found = []
    for path in (run / SAMPLES_FOLDER).glob("step-*"):
        match = _STEP_FOLDER.fullmatch(path.name)
        if match and path.is_dir():
            found.append((int(match[1]), path))
    return sorted(found)
