"""LoRA steps of a model: time, arithmetic and memory, by engine, compilation and attention."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.gpu_check.devices import dense_bf16_tflops
from benchmarks.gpu_check.memory import peak, release, synchronize
from benchmarks.gpu_check.model import Subject, build, sample, settings, step_memory
from benchmarks.gpu_check.planned import planned_step
from qwen_edit_zero.edit_data.batches.batch import EditBatch
from qwen_edit_zero.edit_model.attention import resolve_attention
from qwen_edit_zero.edit_model.transformer import set_attention
from qwen_edit_zero.engines.base import ParallelEngine
from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.training.task import EditTask

DEFAULT_ATTENTION = "native"
# Backends that train and need no compilation of their own. Plain attention would hold every pair of tokens.
ATTENTION = ("_native_flash", "_native_cudnn", "_native_efficient", "flash", "_flash_3", "xformers")


@dataclass(frozen=True)
class Measured:
    """Steps of one kind.

    Attributes:
        setup_seconds: until the engine had its weights.
        first_loss: of the first of these steps.
        seconds: of each timed step.
        tflops: useful arithmetic a second, by the median step; recomputation not counted.
        mfu: that, as a share of the device's peak; None where the peak is not known.
        peak_bytes: most memory in use.
        expected_bytes: by the formulas, without what one block needs to be differentiated.
        planned_bytes, planned_seconds: by the planner: peak, and low and high of a step where it knows the GPU.
    """

    engine: str
    compiled: bool
    attention: str
    setup_seconds: float
    first_loss: float
    seconds: Sequence[float]
    tflops: float
    mfu: float | None
    peak_bytes: int
    expected_bytes: float
    planned_bytes: int
    planned_seconds: tuple[float, float] | None


@dataclass(frozen=True)
class Plan:
    """How many steps, and where."""

    device: torch.device
    warm_up: int = 2
    timed: int = 5


def measure(
    subject: Subject,
    kind: str,
    plan: Plan,
    *,
    more: Callable[[], bool],
    compiled: bool = False,
    attention: Sequence[str] = (),
) -> list[Measured]:
    """Steps under one engine: with PyTorch's choice of attention, then with each of `attention` while `more()`."""
    device = plan.device
    run = settings(subject, kind, device=device, compiled=compiled)
    release(device)
    began = time.perf_counter()
    engine = build(subject, run, device)
    synchronize(device)
    setup_seconds = time.perf_counter() - began
    found: list[Measured] = []
    try:
        for name in (DEFAULT_ATTENTION, *attention):
            if found and not more():
                break
            if name != DEFAULT_ATTENTION:
                set_attention(engine.module, name)
            found.append(_measure_steps(engine, subject, run, plan, name, setup_seconds))
    finally:
        engine.close()
        del engine
        torch._dynamo.reset()  # compiled code remembers the model it was made for
        release(device)
    return found


def _measure_steps(
    engine: ParallelEngine, subject: Subject, run: Settings, plan: Plan, attention: str, setup_seconds: float
) -> Measured:
    device = plan.device
    task, batch = EditTask(subject.folder, run), sample(subject, device)
    release(device)
    losses = [_step(engine, task, batch, run.optimizer.lr) for _ in range(plan.warm_up)]
    seconds = []
    for _ in range(plan.timed):
        synchronize(device)
        began = time.perf_counter()
        losses.append(_step(engine, task, batch, run.optimizer.lr))
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    top = dense_bf16_tflops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    planned_bytes, planned_seconds = planned_step(subject, run, device)
    tflops = task.flops(batch) / median(seconds) / 1e12
    return Measured(
        engine=engine.name,
        compiled=run.model.compile,
        attention=attention,
        setup_seconds=setup_seconds,
        first_loss=losses[0],
        seconds=seconds,
        tflops=tflops,
        mfu=tflops / top if top else None,
        peak_bytes=peak(device),
        expected_bytes=step_memory(subject, engine.name),
        planned_bytes=planned_bytes,
        planned_seconds=planned_seconds,
    )


def _step(engine: ParallelEngine, task: EditTask, batch: EditBatch, lr: float) -> float:
    """What the trainer does in a step of one micro-batch; returns the loss."""
    with engine.micro_step(is_last=True):
        losses = task.losses(engine.forward, batch)
        engine.backward((losses * batch.weights).sum())
    engine.step(lr=lr)
    return float(losses.detach())


def usable_attention(subject: Subject, device: torch.device) -> tuple[list[str], list[str]]:
    """Backends that train on this device, and why the others do not."""
    usable, reasons = [], []
    head_dim = int(subject.config["attention_head_dim"])
    for name in ATTENTION:
        try:
            usable.append(resolve_attention(name, device=device, dtype=torch.bfloat16, head_dim=head_dim, masked=False))
        except SettingsError as error:
            reasons.append(str(error))
    return usable, reasons
