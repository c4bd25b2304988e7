"""What the field believes about memory, from the planner: freezing, LoRA, precision, checkpointing, 8-bit moments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qwen_edit_zero.planning.engines.kinds import Kind, Phase
from qwen_edit_zero.planning.engines.memory import memory
from qwen_edit_zero.planning.hardware.clusters import Accelerator, find_accelerator
from qwen_edit_zero.planning.jobs.job import Job, make_job
from qwen_edit_zero.planning.jobs.tokens import SampleShape
from qwen_edit_zero.planning.passes.flops import step_flops
from qwen_edit_zero.settings.load import load_settings

GIB = 1024**3
MODEL, GPUS, GPU, AREA = "Qwen-Image-Edit-2509", 8, "A100-80", 1024 * 1024
_STATE = (Kind.PARAMETERS, Kind.MASTERS, Kind.GRADIENTS, Kind.MOMENTS, Kind.EMA)
_PHASES = (Phase.FORWARD, Phase.BACKWARD, Phase.STEP)
_MOST_MICRO = 64

FULL, LORA = "recipes/full_finetune.yaml", "recipes/lora.yaml"
TRAINED = {
    "everything": (FULL, ()),
    "all but the modulation layers": ("recipes/freeze_modulation.yaml", ()),
    "attention only": ("recipes/only_attention.yaml", ()),
    "LoRA, rank 32": (LORA, ()),
}
Recipe = tuple[str, tuple[str, ...]]


def job_of(recipe: Recipe, *more: str, micro: int = 1, gpus: int = GPUS) -> Job:
    """A shipped recipe with overrides, on one node, at 1024 x 1024 with one reference."""
    path, overrides = recipe
    said = [f"model.path={MODEL}", f"batch.micro_size={micro}", f"batch.global_size={micro * gpus}", *overrides, *more]
    settings = load_settings(Path(path), overrides=said, world_size=gpus).settings
    sample = SampleShape.of(AREA, references=1)
    return make_job(settings, cluster_world=gpus, gpus_per_node=gpus, sample=sample)


def held(job: Job, gpu: Accelerator) -> dict[Kind, int]:
    """The most bytes of each kind in a step."""
    device = memory(job, gpu).device
    kinds = {kind for phase in _PHASES for kind in device[phase]}
    return {kind: max(device[phase].get(kind, 0) for phase in _PHASES) for kind in kinds}


def peak(job: Job, gpu: Accelerator) -> int:
    """The most bytes of all kinds together in a step."""
    device = memory(job, gpu).device
    return max(sum(device[phase].values()) for phase in _PHASES)


def trained_table() -> list[Sequence[str]]:
    """What freezing saves."""
    gpu = find_accelerator(GPU)
    rows: list[Sequence[str]] = [
        ("trained", "parameters", "weights", "gradients", "moments", "peak of a GPU", "arithmetic", "checkpoint")
    ]
    whole = step_flops(job_of(TRAINED["everything"]))
    for name, recipe in TRAINED.items():
        job = job_of(recipe)
        kinds, flops = held(job, gpu), step_flops(job)
        weights = kinds.get(Kind.PARAMETERS, 0) + kinds.get(Kind.MASTERS, 0)
        share = (flops.useful + flops.recomputed) / (whole.useful + whole.recomputed)
        rows.append(
            (
                name,
                f"{job.trained_elements / 1e9:.2f} B",
                *(gib(size) for size in (weights, kinds.get(Kind.GRADIENTS, 0), kinds.get(Kind.MOMENTS, 0))),
                gib(peak(job, gpu)),
                f"{share:.0%}",
                f"{12 * job.trained_elements / 1e9:.1f} GB",
            )
        )
    return rows


def precision_table() -> list[Sequence[str]]:
    """What mixed precision saves: of weights, gradients and moments nothing, of activations half."""
    gpu = find_accelerator(GPU)
    rows: list[Sequence[str]] = [("engine", "precision", "bytes a parameter, a GPU", "activations", "peak of a GPU")]
    engines = {
        "DDP": "engine.backend=ddp",
        "FSDP2": "engine.backend=fsdp2",
        "ZeRO-2": "ds_configs/zero2.json",
        "ZeRO-3": "ds_configs/zero3.json",
    }
    for engine, said in engines.items():
        for mode in ("fp32", "bf16", "fp16"):
            job = _with_engine(said, f"precision.mode={mode}")
            kinds = held(job, gpu)
            state = sum(kinds.get(kind, 0) for kind in _STATE) / job.trained_elements
            rows.append((engine, mode, f"{state:.2f}", gib(kinds.get(Kind.ACTIVATIONS, 0)), gib(peak(job, gpu))))
    return rows


def checkpointing_table() -> list[Sequence[str]]:
    """What recomputing saves, and costs."""
    gpu = find_accelerator(GPU)
    rows: list[Sequence[str]] = [("kept of a block", "activations of a sample", "arithmetic")]
    ways = {
        "everything": ("none", "false"),
        "its inputs and what attention returns (`selective`)": ("selective", "false"),
        "its inputs (`block`)": ("block", "false"),
        "its inputs, in host memory (`offload_activations`)": ("block", "true"),
    }
    least = step_flops(job_of(TRAINED["everything"], "model.activation_checkpointing=none"))
    for name, (mode, offload) in ways.items():
        said = (f"model.activation_checkpointing={mode}", f"model.offload_activations={offload}")
        job = job_of(TRAINED["everything"], *said)
        flops = step_flops(job)
        share = (flops.useful + flops.recomputed) / (least.useful + least.recomputed)
        rows.append((name, gib(held(job, gpu).get(Kind.ACTIVATIONS, 0)), f"{share:.0%}"))
    return rows


def micro_batch_table() -> list[Sequence[str]]:
    """How many samples a forward pass may have."""
    gpu = find_accelerator(GPU)
    ways = {
        "no recomputing": ("model.activation_checkpointing=none",),
        "`selective`": ("model.activation_checkpointing=selective",),
        "`block`": ("model.activation_checkpointing=block",),
        "`block`, `offload_activations`": (
            "model.activation_checkpointing=block",
            "model.offload_activations=true",
        ),
    }
    columns: Mapping[str, Recipe] = {
        "full, fp32": (FULL, ("precision.mode=fp32",)),
        "full, bf16": (FULL, ()),
        "full, bf16, 8-bit moments": (FULL, ("optimizer.kind=adamw_8bit",)),
        "LoRA, bf16": (LORA, ()),
    }
    rows: list[Sequence[str]] = [("", *columns)]
    for name, said in ways.items():
        rows.append((name, *(str(_largest(recipe, said, gpu) or "-") for recipe in columns.values())))
    return rows


def state_table() -> list[Sequence[str]]:
    """What 8-bit moments save and a running average costs, in GiB a GPU."""
    gpu = find_accelerator(GPU)
    rows: list[Sequence[str]] = [("trained", "AdamW", "8-bit moments", "with `optimizer.ema`")]
    for name, recipe in TRAINED.items():
        cells = []
        for said in ((), ("optimizer.kind=adamw_8bit",), ("optimizer.ema=0.9999",)):
            kinds = held(job_of(recipe, *said), gpu)
            cells.append(gib(sum(kinds.get(kind, 0) for kind in _STATE)))
        rows.append((name, *cells))
    return rows


def gib(size: float) -> str:
    """`38.1 GiB`; two digits below 1."""
    value = size / GIB
    return f"{value:.1f} GiB" if value >= 0.95 else f"{value:.2f} GiB"


def _with_engine(said: str, *more: str) -> Job:
    if said.startswith("engine."):
        return job_of((FULL, (said,)), *more)
    overrides = [f"model.path={MODEL}", "batch.micro_size=1", f"batch.global_size={GPUS}", *more]
    settings = load_settings(Path(FULL), overrides=overrides, ds=Path(said), world_size=GPUS).settings
    sample = SampleShape.of(AREA, references=1)
    return make_job(settings, cluster_world=GPUS, gpus_per_node=GPUS, sample=sample)


def _largest(recipe: Recipe, said: Sequence[str], gpu: Accelerator) -> int:
    """The most samples of a micro-batch that fit, by halving; 0: not one."""

    def fits(micro: int) -> bool:
        return peak(job_of(recipe, *said, micro=micro), gpu) <= gpu.memory

    low, high = 0, _MOST_MICRO + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def as_dict(rows: Sequence[Sequence[str]]) -> dict[str, dict[str, Any]]:
    """Cells by row and column."""
    heads = rows[0]
    return {row[0]: dict(zip(heads[1:], row[1:], strict=True)) for row in rows[1:]}
