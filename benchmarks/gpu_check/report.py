"""What was measured, as tables for people and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median

from benchmarks.engines.tables import Table
from benchmarks.gpu_check.contract import Outcome
from benchmarks.gpu_check.model import Subject
from benchmarks.gpu_check.steps import Measured
from benchmarks.gpu_check.vae import Encoding


@dataclass
class Report:
    """Everything that a run found.

    Attributes:
        left_out: what there was no time or memory for, in words.
    """

    device: str
    subject: Subject
    steps: list[Measured] = field(default_factory=list)
    contract: list[Outcome] = field(default_factory=list)
    encodings: list[Encoding] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    attention_refused: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether every check that was run holds."""
        return all(outcome.passed for outcome in self.contract)

    def write(self, folder: Path) -> None:
        """`gpu_check.md` and `gpu_check.json` in the folder."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "gpu_check.md").write_text(self.markdown(), encoding="utf-8")
        found = {
            "device": self.device,
            "steps": [asdict(row) for row in self.steps],
            "contract": [asdict(row) | {"passed": row.passed} for row in self.contract],
            "vae": [asdict(row) for row in self.encodings],
            "left_out": self.left_out,
        }
        (folder / "gpu_check.json").write_text(json.dumps(found, indent=1), encoding="utf-8")

    def markdown(self) -> str:
        """All tables, and what is missing."""
        tables = [
            step_table(self.steps, self.subject, self.device),
            plan_table(self.steps, self.device),
            contract_table(self.contract),
            vae_table(self.encodings),
        ]
        parts = [table.markdown() for table in tables if table.rows]
        if self.attention_refused:
            parts.append("Attention backends that cannot train here:\n" + _listed(self.attention_refused))
        if self.left_out:
            parts.append("Left out:\n" + _listed(self.left_out))
        return "\n".join(parts)


def step_table(rows: Sequence[Measured], subject: Subject, device: str) -> Table:
    """Time, arithmetic and memory of LoRA steps."""
    columns = ["engine", "blocks", "attention", "setup s", "step ms", "from - to", "TFLOP/s", "MFU", "peak GB",
               "formula GB", "the rest", "first loss"]  # fmt: skip
    unit = subject.tokens * subject.width * 2
    cells = [
        [
            row.engine,
            "compiled" if row.compiled else "eager",
            row.attention,
            f"{row.setup_seconds:.1f}",
            f"{median(row.seconds) * 1e3:.1f}",
            f"{min(row.seconds) * 1e3:.1f} - {max(row.seconds) * 1e3:.1f}",
            f"{row.tflops:.4g}",
            "?" if row.mfu is None else f"{row.mfu:.1%}",
            f"{row.peak_bytes / 1e9:.2f}",
            f"{row.expected_bytes / 1e9:.2f}",
            f"{(row.peak_bytes - row.expected_bytes) / unit:.0f} x",
            f"{row.first_loss:.4f}",
        ]
        for row in rows
    ]
    notes = (
        f"{subject.config['num_layers']} blocks of width {subject.width}, LoRA of rank {subject.rank}, bf16, each "
        f"block recomputed; one sample of {subject.pixels}x{subject.pixels} with one reference as large and "
        f"{subject.prompt_tokens} prompt tokens: {subject.tokens:,} tokens. Step: median. TFLOP/s: useful arithmetic "
        f"(recomputation not counted); MFU: its share of the dense bf16 peak. Formula: state, gradients, gathered "
        f"parameters and kept block inputs; the rest, in tensors of (tokens, width) in bf16, is what one block needs "
        f"to be differentiated, and workspaces."
    )
    return Table(f"LoRA steps on {device}", columns, cells, notes)


def plan_table(rows: Sequence[Measured], device: str) -> Table:
    """The planner's memory and time beside what was measured."""
    columns = ["engine", "blocks", "attention", "peak GiB", "planned GiB", "off by", "step s", "planned s", "within"]
    cells = []
    for row in rows:
        step, planned = median(row.seconds), row.planned_seconds
        cells.append(
            [
                row.engine,
                "compiled" if row.compiled else "eager",
                row.attention,
                f"{row.peak_bytes / 2**30:.2f}",
                f"{row.planned_bytes / 2**30:.2f}",
                f"{row.planned_bytes / row.peak_bytes - 1:+.1%}",
                f"{step:.3f}",
                "?" if planned is None else f"{planned[0]:.3f} - {planned[1]:.3f}",
                "?" if planned is None else "yes" if planned[0] <= step <= planned[1] else "no",
            ]
        )
    notes = (
        "What `qwen-edit-zero plan` says of these steps. Memory is what tensors take, without the CUDA context and "
        "fragmentation. Blocks are planned as if they were not compiled. (On a CPU the measured peak is the process's "
        "resident set, which holds Python and its libraries too.)"
    )
    return Table(f"Planned and measured on {device}", columns, cells, notes)


def contract_table(outcomes: Sequence[Outcome]) -> Table:
    """One row a finding."""
    rows = []
    for outcome in outcomes:
        for finding in outcome.findings:
            verdict = "holds" if finding.holds else "**does not hold**"
            rows.append([outcome.check, finding.what, f"{finding.found:.2g}", f"{finding.limit:.2g}", verdict])
        if outcome.error:
            rows.append([outcome.check, outcome.error.replace("|", "/"), "-", "-", "**failed**"])
    passed = sum(outcome.passed for outcome in outcomes)
    notes = f"{passed} of {len(outcomes)} checks passed. Relative deviations, or numbers of exceptions."
    return Table("Contract", ["check", "what", "found", "at most", ""], rows, notes)


def vae_table(encodings: Sequence[Encoding]) -> Table:
    """One row a way to encode."""
    rows = [
        [
            "channels last" if row.channels_last else "as stored",
            "on" if row.cudnn_benchmark else "off",
            f"{row.seconds * 1e3:.1f}",
        ]
        for row in encodings
    ]
    return Table("The VAE encodes a picture", ["layout", "cuDNN's timing of kernels", "ms"], rows)


def _listed(lines: Sequence[str]) -> str:
    return "".join(f"- {line}\n" for line in lines)
