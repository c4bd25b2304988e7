"""Write the tables of docs/plan_evidence.md: `python -m benchmarks.planner.evidence`.

Each table lies between two comments with its name and is made anew from the planner and its files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.planner import folklore
from qwen_edit_zero.planning.evidence.published import Measurement, Prediction, not_modelled, predict, published, rates
from qwen_edit_zero.planning.hardware.clusters import known_accelerators
from qwen_edit_zero.planning.wording.quantities import GIB

PAGE = Path(__file__).resolve().parents[2] / "docs/plan_evidence.md"
_BEGIN, _END = "<!-- begin table {} -->", "<!-- end table {} -->"


def measured_table() -> list[Sequence[str]]:
    """Published measurements beside predictions."""
    rows: list[Sequence[str]] = [("", "who, what", "measured", "predicted", "error")]
    for number, one in enumerate(published(), 1):
        said = predict(one)
        rows.append((str(number), f"{one.trainer}: {one.setup}", _measured(one), _predicted(said), _error(one, said)))
    return rows


def sources_table() -> list[Sequence[str]]:
    """Where each of the measurements is from, and what is not the same."""
    rows: list[Sequence[str]] = [("", "source", "what differs there", "assumed")]
    for number, one in enumerate(published(), 1):
        rows.append((str(number), one.source, one.differs, one.assumed))
    return rows


def not_modelled_table() -> list[Sequence[str]]:
    """Measurements that nothing is predicted of."""
    rows: list[Sequence[str]] = [("what", "measured", "source", "why nothing is predicted")]
    return rows + [(e["setup"], e["measured"], e["source"], e["why"]) for e in not_modelled()]


def rates_table() -> list[Sequence[str]]:
    """Published shares of the peak."""
    rows: list[Sequence[str]] = [("training", "useful (MFU)", "with recomputing", "source")]
    for entry in rates():
        rows.append((entry["what"], _share(entry["useful"]), _share(entry.get("hardware", "")), entry["source"]))
    return rows


def accelerators_table() -> list[Sequence[str]]:
    """The table of GPUs."""
    rows: list[Sequence[str]] = [
        (
            "`--gpus`",
            "memory",
            "bf16, TFLOP/s",
            "reached",
            "memory, GB/s",
            "link, GB/s",
            "network, GB/s a GPU",
            "source",
        )
    ]
    for gpu in known_accelerators().values():
        source = gpu.source + (f". {gpu.note[0].upper()}{gpu.note[1:]}" if gpu.note else "")
        rows.append(
            (
                gpu.name,
                f"{gpu.memory / GIB:.1f} GiB",
                f"{gpu.bf16_flops / 1e12:g}",
                f"{gpu.reached[0]:.0%}-{gpu.reached[1]:.0%}",
                f"{gpu.memory_bandwidth / 1e9:g}",
                f"{gpu.link / 1e9:g} ({gpu.link_kind})",
                f"{gpu.network / 1e9:g}",
                source,
            )
        )
    return rows


TABLES: dict[str, Callable[[], list[Sequence[str]]]] = {
    "measured": measured_table,
    "sources": sources_table,
    "not modelled": not_modelled_table,
    "rates": rates_table,
    "accelerators": accelerators_table,
    "trained": folklore.trained_table,
    "precision": folklore.precision_table,
    "checkpointing": folklore.checkpointing_table,
    "micro-batch": folklore.micro_batch_table,
    "state": folklore.state_table,
}


def with_tables(page: str) -> str:
    """The page with all of its tables made anew."""
    for name, make in TABLES.items():
        begin, end = re.escape(_BEGIN.format(name)), re.escape(_END.format(name))
        body = f"{_BEGIN.format(name)}\n{_markdown(make())}\n{_END.format(name)}"
        page, found = re.subn(f"{begin}.*?{end}", lambda _, body=body: body, page, flags=re.DOTALL)  # type: ignore[misc]
        assert found == 1, f"{PAGE.name} must have the table {name!r} once"
    return page


def _markdown(rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _measured(one: Measurement) -> str:
    parts = []
    if one.memory is not None:
        parts.append(f"{one.memory / GIB:.1f} GiB")
    if one.seconds is not None:
        parts.append(f"{one.seconds:g} s")
    if one.fits is not None:
        parts.append("runs" if one.fits else "out of memory")
    return ", ".join(parts)


def _predicted(said: Prediction) -> str:
    parts = []
    if said.memory is not None:
        parts.append(f"{said.memory / GIB:.1f} GiB")
    if said.seconds is not None:
        parts.append(f"{said.seconds[0]:.2g}-{said.seconds[1]:.2g} s")
    if said.fits is not None:
        parts.append("fits" if said.fits else "does not fit")
    return ", ".join(parts)


def _error(one: Measurement, said: Prediction) -> str:
    parts = []
    if said.memory_error is not None:
        parts.append(f"{said.memory_error:+.0%}")
    if said.seconds_error is not None:
        late = said.seconds_error
        parts.append("in the range" if not late else f"takes {abs(late):.0%} {'more' if late > 0 else 'less'}")
    if said.fits is not None:
        parts.append("right" if said.fits == one.fits else "**wrong**")
    return ", ".join(parts)


def _share(value: object) -> str:
    return f"{value:.0%}" if isinstance(value, float) else str(value)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
