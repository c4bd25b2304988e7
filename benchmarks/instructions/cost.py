"""What preparing an instruction costs, on one core."""

from __future__ import annotations

import time

from benchmarks.engines.tables import Table
from qwen_edit_zero.edit_data.instructions.prepare import Instructions
from qwen_edit_zero.settings.models import DataSettings
from tests.edit_data.instructions.harmless import HARMLESS

_REPEATS = 5


class _Row:
    def __init__(self, instruction: str) -> None:
        self.instruction, self.paraphrases = instruction, ()


def measure() -> list[Table]:
    """Microseconds an instruction, the best of some repeats, and hours of one core for ten million."""
    rows = []
    for name, data in (
        ("chat markup only (defaults)", DataSettings()),
        ("normalise", DataSettings(normalise=True)),
        ("safety", DataSettings(safety="block")),
        ("normalise and safety", DataSettings(normalise=True, safety="block")),
        ("paraphrases by templates", DataSettings(paraphrases=True, paraphrase_templates=True)),
    ):
        began = time.perf_counter()
        instructions = Instructions(data)
        read = time.perf_counter() - began
        best = min(_seconds(instructions) for _ in range(_REPEATS)) / len(HARMLESS)
        rows.append((name, f"{read:.2f}", f"{best * 1e6:.1f}", f"{best * 1e7 / 3600:.2f}"))
    title = f"Preparing one of {len(HARMLESS)} instructions"
    return [Table(title, ("settings", "s to read the rules", "µs each", "core hours for 10 million"), rows)]


def _seconds(instructions: Instructions) -> float:
    began = time.perf_counter()
    for text in HARMLESS:
        instructions.candidates(_Row(text))
    return time.perf_counter() - began
