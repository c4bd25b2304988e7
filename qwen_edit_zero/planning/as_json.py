"""A plan as nested dicts of numbers: bytes, seconds, FLOP."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from qwen_edit_zero.planning.engines.kinds import Kind, Phase
from qwen_edit_zero.planning.jobs.tokens import SampleShape
from qwen_edit_zero.planning.plan import Plan


def as_json(plan: Plan) -> dict[str, Any]:
    """Everything that `page` shows. Names are those of the planner's classes."""
    job, (phase, peak) = plan.job, plan.memory.peak
    cluster, accelerator = plan.cluster, plan.accelerator
    return {
        "model": job.settings.model.path,
        "engine": job.kind,
        "engine_name": job.name,
        "ranks": job.world,
        "gpus_per_node": job.gpus_per_node,
        "gpu": None if accelerator is None else {"name": accelerator.name, "memory": accelerator.memory},
        "cluster": None if cluster is None else cluster.name,
        "parameters": {"trained": job.trained_elements, "frozen": job.frozen_elements},
        "batch": {
            "global_size": job.settings.batch.global_size,
            "micro_size": job.micro,
            "accumulation": job.accumulation,
            "sequence_parallel": job.sequence,
        },
        "sample": sample_json(job.sample),
        "fits": plan.fits,
        "verdict": plan.verdict,
        "peak": {"phase": phase.name.lower(), "bytes": peak},
        "host_peak": {"phase": plan.host_peak[0].name.lower(), "bytes_a_node": plan.host_peak[1]},
        "host_needed": {"phase": plan.host_needed[0].name.lower(), "bytes_a_node": plan.host_needed[1]},
        "memory": _phases(plan.memory.device),
        "host_memory": _phases(plan.memory.host),
        "flops": asdict(plan.flops),
        "traffic": [
            {"operation": operation, "group": group, "within": found.within, "between": found.between}
            for (operation, group), found in plan.traffic.items()
        ],
        "timing": None if plan.timing is None else asdict(plan.timing),
        "cost": None if plan.cost is None else asdict(plan.cost),
    }


def sample_json(sample: SampleShape) -> dict[str, Any]:
    """Grids are (rows, columns) of tokens."""
    return {
        "target": list(sample.target),
        "references": [list(grid) for grid in sample.references],
        "text_tokens": sample.text_tokens,
        "tokens": sample.tokens,
    }


def _phases(memory: Mapping[Phase, Mapping[Kind, int]]) -> dict[str, dict[str, int]]:
    return {
        phase.name.lower(): {kind.name.lower(): size for kind, size in kinds.items()} for phase, kinds in memory.items()
    }
