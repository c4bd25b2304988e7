"""Checks of small sets in tests."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from qwen_edit_zero.edit_data.cache.needs import Making
from qwen_edit_zero.edit_data.check.checking import Asked, Checked, check_table
from qwen_edit_zero.edit_data.check.rules import NewRules, RowRules
from qwen_edit_zero.edit_data.instructions.prepare import Instructions
from qwen_edit_zero.edit_data.manifests.opening import open_manifest
from qwen_edit_zero.errors import DataError
from qwen_edit_zero.settings.models import DataSettings
from tests.edit_data.cache.filling import AREAS, NoBar


@dataclass
class Bar(NoBar):
    """Shows nothing."""

    title: str
    total: int

    def advance(self, units: int = 1, text: str = "") -> None:
        pass


def too_long(text: str) -> bool:
    """What the model of these tests does not take."""
    return "too long" in text


def tokens_of(text: str) -> int:
    if too_long(text):
        raise DataError(f"the instruction {text!r} is too long")
    return len(text.split())


def make_rules(making: Making, safety: Any = "off", check_text: Any = tokens_of) -> RowRules:
    instructions = Instructions(DataSettings(safety="flag"))
    return RowRules(making, lambda sample: instructions.prepare(sample.instruction), check_text, safety)


@dataclass
class Outcome:
    """A check, and what it wrote."""

    checked: Checked
    findings: list[dict[str, Any]] = field(default_factory=list)
    clean: list[dict[str, Any]] = field(default_factory=list)

    def kinds(self, id_: str) -> set[str]:
        """What is said of a row in findings.jsonl."""
        return {f["kind"] for f in self.findings if f["id"] == id_}

    def counts(self) -> dict[str, int]:
        """Findings by kind, notes too."""
        return {found.kind.name: found.count for found in self.checked.found}

    @property
    def accepted(self) -> list[str]:
        return [row["id"] for row in self.clean]


def check(
    manifest: Path,
    out: Path,
    *,
    new_rules: NewRules | None = None,
    making: Making | None = None,
    workers: int | None = 0,
    cache: Path | None = None,
    **more: Any,
) -> Outcome:
    """Check a manifest with areas for tiny pictures, in this process."""
    making = making or Making(AREAS)
    asked = Asked(
        table=open_manifest(manifest, on_error="skip", index_folder=out / "manifests"),
        references=3,
        new_rules=new_rules or partial(make_rules, making),
        area=making.areas.vae,
        align=making.align,
        step=1,
        tokens=True,
        cache=cache or out / "cache",
        out=out,
        workers=workers,
        **more,
    )
    checked = check_table(asked, Bar)
    return Outcome(checked, _lines(out / "findings.jsonl"), _lines(out / "clean.jsonl"))


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def scene(seed: int, width: int = 320, height: int = 256) -> Image.Image:
    """Something like a photograph: forms of all sizes, the finer the fainter, in few colours; each seed has its own."""
    random = np.random.default_rng(seed)
    grey, colour = np.zeros((height, width, 1)), np.zeros((height, width, 3))
    for cells, levels in ((3, 30), (6, 30), (12, 24), (24, 18), (48, 12), (96, 8), (192, 5), (384, 3)):
        grey += levels * _forms(random, cells, 1, width, height)
        if cells < 20:
            colour += levels / 2 * _forms(random, cells, 3, width, height)
    return Image.fromarray(np.clip(grey + colour + 128, 0, 255).astype(np.uint8))


def _forms(random: np.random.Generator, cells: int, channels: int, width: int, height: int) -> np.ndarray:
    values = np.clip(random.normal(0, 40, (cells, cells, channels)) + 128, 0, 255).astype(np.uint8)
    layers = [
        Image.fromarray(values[..., i]).resize((width, height), Image.Resampling.BICUBIC) for i in range(channels)
    ]
    return (np.stack([np.asarray(layer, float) for layer in layers], -1) - 128) / 40
