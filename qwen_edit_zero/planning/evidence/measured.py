"""RUN/measured.json: what a run measured of itself, to be compared with its plan."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from qwen_edit_zero.errors import UserError

MEASURED_FILE = "measured.json"
_VERSION = 1


@dataclass(frozen=True)
class StepTimes:
    """Steps after the warm-up, in seconds; samples a second of all ranks, useful TFLOP a second of each."""

    count: int
    median: float
    lowest: float
    highest: float
    samples_per_second: float
    tflops_per_device: float


@dataclass(frozen=True)
class Measured:
    """What a run measured. Bytes are those of the rank that had most.

    Attributes:
        engine: ddp, zero1, zero2, zero3 or fsdp2.
        device, device_bytes: name and memory of rank 0's; None for CPUs.
        config: the transformer's configuration.
        target, references: grids (rows, columns) of tokens of the largest micro-batch.
        text_tokens, samples, is_padded: of that micro-batch.
        times: of steps after the warm-up; None if there were none.
        state: bytes between steps by kind (parameters, masters, moments, ema); gradients: after the last backward pass.
        host_state: the same in host memory, where devices are GPUs.
        peaks: most device memory by phase; empty on CPUs.
        reserved: most device memory that torch's allocator held.
        resident: peak resident set of a rank's process.
    """

    engine: str
    ranks: int
    ranks_per_node: int
    device: str
    device_bytes: int | None
    config: Mapping[str, Any]
    target: tuple[int, int]
    references: tuple[tuple[int, int], ...]
    text_tokens: int
    samples: int
    is_padded: bool
    first_step: int
    last_step: int
    times: StepTimes | None
    state: Mapping[str, int]
    host_state: Mapping[str, int]
    peaks: Mapping[str, int]
    reserved: int
    resident: int

    def write(self, path: Path) -> None:
        """Write the file whole."""
        temporary = path.with_name(f".{path.name}.partial")
        temporary.write_text(json.dumps({"version": _VERSION} | asdict(self), indent=1) + "\n", encoding="utf-8")
        os.replace(temporary, path)

    @classmethod
    def read(cls, run: Path) -> Measured:
        """The measurements of a run folder. Raises UserError if there are none, or if they are damaged."""
        path = run / MEASURED_FILE
        if not run.is_dir():
            raise UserError(f"{run} is no folder; name that of a run, such as runs/demo")
        if not path.is_file():
            raise UserError(
                f"{run} has no {MEASURED_FILE}: it is no run folder, or its run ended before it had measured anything "
                "(that takes three steps), or an older version wrote it. Train a few steps, with --fast-dev-run say"
            )
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.pop("version") != _VERSION:
                raise UserError(f"{path} was written by another version of this program; train a few steps with this")
            times = found.pop("times")
            return cls(
                **found
                | {
                    "target": tuple(found["target"]),
                    "references": tuple(tuple(grid) for grid in found["references"]),
                    "times": None if times is None else StepTimes(**times),
                }
            )
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{path} cannot be read ({error}); train a few steps again") from error
