"""What the planner says of the steps that are measured."""

from __future__ import annotations

import torch

from benchmarks.gpu_check.model import Subject
from qwen_edit_zero.planning.engines.kinds import Kind
from qwen_edit_zero.planning.hardware.clusters import Cluster, accelerator_of_device
from qwen_edit_zero.planning.jobs.job import make_job
from qwen_edit_zero.planning.jobs.tokens import SampleShape
from qwen_edit_zero.planning.plan import Plan
from qwen_edit_zero.settings.models import Settings

_NOT_ALLOCATED = (Kind.CONTEXT, Kind.FRAGMENTATION)  # torch counts neither among what is allocated


def planned_step(subject: Subject, run: Settings, device: torch.device) -> tuple[int, tuple[float, float] | None]:
    """(bytes allocated at the peak, seconds of a step from low to high) of one sample on one GPU; no time for GPUs that
    the planner does not know."""
    side = subject.pixels // 16
    batch = run.batch.model_copy(update={"global_size": 1, "micro_size": 1})
    job = make_job(
        run.model_copy(update={"batch": batch}),
        cluster_world=1,
        gpus_per_node=1,
        sample=SampleShape((side, side), ((side, side),), subject.prompt_tokens),
        config=subject.config,
    )
    plan = Plan(job, _gpu(device))
    steps = [plan.memory.device[phase] for phase in plan.memory.device if phase.name in ("FORWARD", "BACKWARD", "STEP")]
    peak = max(sum(size for kind, size in kinds.items() if kind not in _NOT_ALLOCATED) for kinds in steps)
    return peak, None if plan.timing is None else plan.timing.step_s


def _gpu(device: torch.device) -> Cluster | None:
    if device.type != "cuda":
        return None
    kind = accelerator_of_device(torch.cuda.get_device_name(device))
    return None if kind is None else Cluster(1, 1, kind, kind.network, kind.host_memory)
