"""What the planner says of a run that begins, and how that compares with what the run measures. Never fails a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

from qwen_edit_zero.edit_model.folder import ModelFolder
from qwen_edit_zero.edit_model.sizes import PATCH, VAE_FACTOR
from qwen_edit_zero.engines.base import ParallelEngine
from qwen_edit_zero.planning.evidence.measured import Measured
from qwen_edit_zero.planning.hardware.clusters import Cluster, accelerator_of_device
from qwen_edit_zero.planning.jobs.job import make_job
from qwen_edit_zero.planning.jobs.tokens import SampleShape
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.training.conditioning import TrainingData

Say = Callable[[str], None]


def tell_plan(settings: Settings, folder: ModelFolder, data: TrainingData, engine: ParallelEngine, say: Say) -> None:
    """Say the plan's three lines, for the largest samples of the data and the devices of this rank."""
    if engine.ranks.rank != 0:
        return
    try:
        from qwen_edit_zero.planning.plan import Plan
        from qwen_edit_zero.planning.words import three_lines

        world = engine.ranks.world_size
        on_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        job = make_job(
            settings,
            cluster_world=world,
            gpus_per_node=on_node,
            sample=largest_sample(data),
            config=folder.transformer_config,
        )
        say("\n".join(three_lines(Plan(job, cluster_of(engine.device, world, on_node), samples=len(data.samples)))))
    except Exception as error:
        say(f"plan: not made ({type(error).__name__}: {error})")


def tell_comparison(settings: Settings, measured: Measured, say: Say) -> None:
    """Say what was predicted of that which has been measured."""
    try:
        from qwen_edit_zero.planning.evidence.compare import compare, comparison_line

        say(comparison_line(compare(settings, measured)))
    except Exception as error:
        say(f"measured: not compared with the plan ({type(error).__name__}: {error})")


def largest_sample(data: TrainingData) -> SampleShape:
    """The sizes of the bucket with the most image tokens, and the longest text of all samples."""
    buckets = data.prepared.buckets
    sizes = buckets[int(data.image_tokens().argmax())] // (VAE_FACTOR * PATCH)
    target, *references = [(int(height), int(width)) for width, height in sizes]
    text = int(data.prepared.text_tokens().max())
    return SampleShape(target, tuple(grid for grid in references if all(grid)), text)


def cluster_of(device: torch.device, world: int, on_node: int) -> Cluster | None:
    """GPUs of this kind, if the planner knows it."""
    if device.type != "cuda":
        return None
    memory = int(torch.cuda.get_device_properties(device).total_memory)
    kind: Any = accelerator_of_device(torch.cuda.get_device_name(device), memory=memory)
    if kind is None:
        return None
    host = int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    return Cluster(-(-world // on_node), min(world, on_node), kind, kind.network, host)
