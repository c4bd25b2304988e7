"""Whether the run fits into the memory of its GPUs, as the planner says; docs/plan.md."""

from __future__ import annotations

from collections.abc import Sequence

from qwen_edit_zero.doctor.findings import Finding, Level
from qwen_edit_zero.doctor.gpus import Gpu
from qwen_edit_zero.doctor.nodes import Node
from qwen_edit_zero.edit_model.folder import ModelFolder
from qwen_edit_zero.errors import QwenEditError
from qwen_edit_zero.planning.engines.memory import memory
from qwen_edit_zero.planning.hardware.clusters import accelerator_of_device
from qwen_edit_zero.planning.jobs.dataset import data_facts
from qwen_edit_zero.planning.jobs.job import make_job
from qwen_edit_zero.planning.jobs.wish import Shape, sample_of
from qwen_edit_zero.planning.wording.quantities import show_bytes
from qwen_edit_zero.settings.models import Settings

_TIGHT = 0.94  # of the memory; published measurements lie up to a tenth from their predictions
_TOPIC = "memory of the run"


def judge(
    settings: Settings, folder: ModelFolder | None, everyone: Sequence[Gpu | None], nodes: Sequence[Node]
) -> list[Finding]:
    """The planned peak of a rank against the smallest GPU of the ranks; nothing on CPUs.

    Args:
        folder: None if it cannot be read: then the planner goes by the model's name.
    """
    there = [gpu for gpu in everyone if gpu is not None]
    if not there:
        return []
    least = min(there, key=lambda gpu: gpu.total)
    try:
        job = make_job(
            settings,
            cluster_world=len(everyone),
            gpus_per_node=max(len(node.ranks) for node in nodes),
            sample=sample_of(settings, Shape(), data_facts(settings.data)),
            config=None if folder is None else folder.transformer_config,
        )
    except QwenEditError as error:
        return [Finding("machines", _TOPIC, Level.UNCHECKED, f"no plan can be made: {error}")]
    phase, peak = memory(job, accelerator_of_device(least.name, memory=least.total)).peak
    text = f"{show_bytes(peak)} a GPU are planned at the peak ({phase}), of {show_bytes(least.total)}"
    if peak > least.total:
        return [Finding("machines", _TOPIC, Level.WARNING, text, "`qwen-edit-zero plan --recommend` says what fits")]
    if peak > _TIGHT * least.total:
        return [Finding("machines", _TOPIC, Level.WARNING, text, "tight; `qwen-edit-zero plan` tells what it is for")]
    return [Finding("machines", _TOPIC, Level.OK, text)]
