"""What a run measures of itself: memory by kind and by phase, and the time of its steps. RUN/measured.json.

`qwen-edit-zero plan --compare RUN` shows it beside what the planner says of the same run.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

from qwen_edit_zero.cluster.collectives import gather_objects
from qwen_edit_zero.edit_data.batches.batch import EditBatch
from qwen_edit_zero.edit_model.sizes import PATCH
from qwen_edit_zero.engines.base import ParallelEngine
from qwen_edit_zero.planning.evidence.measured import MEASURED_FILE, Measured, StepTimes
from qwen_edit_zero.training.metrics import StepMetrics, memory_peak_bytes

WARM_UP = 2  # steps whose time does not count: kernels are chosen and compiled, memory is found
ENOUGH = 20  # steps after which the first figures are told
LOAD, FORWARD, BACKWARD, STEP, BETWEEN = "load", "forward", "backward", "step", "between steps"


class Measurements:
    """Told by the trainer where it is. Costs a look at the allocator's counters at the end of each phase.

    Peaks are known on GPUs only. What the engine holds is counted once, on every device, if `counting`.
    """

    def __init__(self, engine: ParallelEngine, *, counting: bool = True) -> None:
        self._engine, self._device, self._counting = engine, engine.device, counting
        self._on_gpu = engine.device.type == "cuda"
        self._peaks: dict[str, int] = {}
        self._overall = 0
        self._steps = 0
        self._state: dict[str, int] = {}
        self._host_state: dict[str, int] = {}
        self._largest: dict[str, Any] = {}
        self._tokens = 0
        self.after(LOAD)

    @property
    def steps(self) -> int:
        """Optimizer steps seen."""
        return self._steps

    def memory_peak_bytes(self) -> int:
        """As `metrics.memory_peak_bytes`: since the process began, whatever has been looked at meanwhile."""
        return max(self._overall, memory_peak_bytes(self._device))

    def after(self, phase: str) -> None:
        """A phase has ended."""
        if not self._on_gpu:
            return
        peak = int(torch.cuda.max_memory_allocated(self._device))
        self._peaks[phase] = max(peak, self._peaks.get(phase, 0))
        self._overall = max(peak, self._overall)
        torch.cuda.reset_peak_memory_stats(self._device)

    def after_forward(self, batch: EditBatch) -> None:
        """The forward pass of a micro-batch has ended."""
        self.after(FORWARD)
        grids = [_grid(latents) for latents in (batch.target_latents, *batch.reference_latents)]
        text = int(batch.prompt_embeds.shape[1])
        tokens = len(batch) * (text + sum(rows * columns for rows, columns in grids))
        if tokens > self._tokens:
            self._tokens = tokens
            self._largest = {
                "target": grids[0], "references": grids[1:], "text_tokens": text, "samples": len(batch),
                "is_padded": batch.prompt_mask is not None,
            }  # fmt: skip

    def after_backward(self, *, is_last: bool) -> None:
        """The backward pass of a micro-batch has ended, the step's last one or not."""
        self.after(BACKWARD)
        if is_last and self._steps == 1:  # the first step has made everything that stays
            self._count(gradients=True)

    def after_step(self) -> None:
        """The optimizer has stepped."""
        self.after(STEP)
        self._steps += 1
        if self._steps == WARM_UP:
            self._count(gradients=False)

    def _count(self, *, gradients: bool) -> None:
        """Bytes of storage of what the engine holds, each storage once."""
        if not self._counting:
            return
        seen: set[int] = set()
        counts: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
        for kind, tensor in self._engine.held():
            storage = tensor.untyped_storage()
            if storage.nbytes() and (kind == "gradients") == gradients and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                counts[tensor.device.type == self._device.type][kind] += storage.nbytes()
        self._state.update(counts[True])
        self._host_state.update(counts[False])

    def share(self) -> dict[str, Any]:
        """What this rank adds to the record."""
        return {
            "state": self._state,
            "host_state": self._host_state,
            "peaks": self._peaks,
            "largest": self._largest,
            "tokens": self._tokens,
            "reserved": int(torch.cuda.max_memory_reserved(self._device)) if self._on_gpu else 0,
            "resident": memory_peak_bytes(torch.device("cpu")),
        }


class MeasuredHook:
    """Writes RUN/measured.json after the first steps and at the end, and tells how it compares with the plan."""

    def __init__(
        self,
        measurements: Measurements,
        folder: Path,
        *,
        rank: int,
        config: dict[str, Any],
        first: int,
        tell: Callable[[Measured], None] = lambda measured: None,
    ) -> None:
        self._measurements, self._folder, self._rank = measurements, folder, rank
        self._config, self._first, self._tell = config, first, tell
        self._times: list[float] = []
        self._rates: list[float] = []
        self._tflops: list[float] = []
        self._step = first
        self._told = False

    def after_step(self, metrics: StepMetrics, *, is_last: bool) -> None:
        """Note the step's time. Collective once, after the first steps."""
        self._step = metrics.step
        if self._measurements.steps > WARM_UP:
            self._times.append(metrics.step_seconds)
            self._rates.append(metrics.samples_per_second)
            self._tflops.append(metrics.tflops_per_device)
        if len(self._times) == ENOUGH and not is_last:
            self.write()

    def write(self) -> None:
        """Write what is known; nothing before the warm-up is over. Collective."""
        if self._measurements.steps < WARM_UP:
            return
        shares = gather_objects(self._measurements.share())
        if self._rank != 0:
            return
        measured = self._record(shares)
        measured.write(self._folder / MEASURED_FILE)
        if not self._told:
            self._told = True
            self._tell(measured)

    def _record(self, shares: list[dict[str, Any]]) -> Measured:
        engine = self._measurements._engine
        device = engine.device
        on_gpu = device.type == "cuda"
        largest = max(shares, key=lambda share: int(share["tokens"]))["largest"]
        times = None
        if self._times:
            times = StepTimes(
                count=len(self._times),
                median=median(self._times),
                lowest=min(self._times),
                highest=max(self._times),
                samples_per_second=median(self._rates),
                tflops_per_device=median(self._tflops),
            )
        return Measured(
            engine=engine.name,
            ranks=engine.ranks.world_size,
            ranks_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", engine.ranks.world_size)),
            device=torch.cuda.get_device_name(device) if on_gpu else "CPU",
            device_bytes=torch.cuda.get_device_properties(device).total_memory if on_gpu else None,
            config=self._config,
            target=tuple(largest["target"]),
            references=tuple(map(tuple, largest["references"])),
            text_tokens=largest["text_tokens"],
            samples=largest["samples"],
            is_padded=largest["is_padded"],
            first_step=self._first + 1,
            last_step=self._step,
            times=times,
            state=_most([share["state"] for share in shares]),
            host_state=_most([share["host_state"] for share in shares]),
            peaks=_most([share["peaks"] for share in shares]),
            reserved=max(share["reserved"] for share in shares),
            resident=max(share["resident"] for share in shares),
        )


def _grid(latents: torch.Tensor) -> tuple[int, int]:
    """(rows, columns) of tokens of latents of any leading shape."""
    return int(latents.shape[-2]) // PATCH, int(latents.shape[-1]) // PATCH


def _most(counts: list[dict[str, int]]) -> dict[str, int]:
    """Of each kind the most that a rank has."""
    names = dict.fromkeys(name for count in counts for name in count)
    return {name: max(count.get(name, 0) for count in counts) for name in names}
