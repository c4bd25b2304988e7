"""RUN/measured.json: what a run measured of itself, to be compared with its plan."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from qwen_edit_zero.errors import UserError

MEASURED_FILE = "measured.json"
_VERSION = 1
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Rate = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Grid = tuple[PositiveInt, PositiveInt]
_BytesByKind = Mapping[str, NonNegativeInt]


@dataclass(frozen=True)
class StepTimes:
    """Steps after the warm-up, in seconds; samples a second of all ranks, useful TFLOP a second of each."""

    count: PositiveInt
    median: _Positive
    lowest: _Positive
    highest: _Positive
    samples_per_second: _Rate
    tflops_per_device: _Rate


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
    ranks: PositiveInt
    ranks_per_node: PositiveInt
    device: str
    device_bytes: PositiveInt | None
    config: Mapping[str, Any]
    target: _Grid
    references: tuple[_Grid, ...]
    text_tokens: PositiveInt
    samples: PositiveInt
    is_padded: bool
    first_step: NonNegativeInt
    last_step: NonNegativeInt
    times: StepTimes | None
    state: _BytesByKind
    host_state: _BytesByKind
    peaks: _BytesByKind
    reserved: NonNegativeInt
    resident: NonNegativeInt

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
            return TypeAdapter(cls).validate_python(found)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise UserError(
                f"{path} is damaged: {where} is {first['input']!r:.80} ({first['msg']}); train a few steps again"
            ) from error
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{path} cannot be read ({error}); train a few steps again") from error
