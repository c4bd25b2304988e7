"""What the planner says of state and traffic is what engines hold and send, to the byte."""

from __future__ import annotations

from typing import Any

import pytest

from qwen_edit_zero.planning.engines.communication import traffic
from qwen_edit_zero.planning.engines.kinds import Kind, added
from qwen_edit_zero.planning.engines.layout import flat_elements, sub_groups
from qwen_edit_zero.planning.engines.state import FP32, STEP_COUNTER, state
from qwen_edit_zero.planning.evidence.compare import gradient_bytes
from qwen_edit_zero.planning.jobs.job import Job
from tests.planning.ranks_at_work import Case, hold_and_send, job_of
from tests.ranks import run_ranks

LORA = {"model": {"lora": {"rank": 4, "targets": ("attn.to_q", "img_mlp.net.2", "txt_mlp.net.2")}}}
FREEZE = {"model": {"freeze": ("*_mod.*", "*.to_q.*", "img_in.weight")}}
AVERAGE = {"optimizer": {"ema": 0.9}}
BLOCK = {"model": {"activation_checkpointing": "block"}}
NOTHING_KEPT = {"stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 1}
SOME_KEPT = {"stage3_max_live_parameters": 150_000, "stage3_max_reuse_distance": 90_000}


def engine(**options: Any) -> dict[str, dict[str, Any]]:
    return {"engine": options}


CASES: dict[int, list[Case]] = {
    2: [
        ("ddp", {}, {}),
        ("ddp", LORA | AVERAGE, {}),
        ("ddp", {"optimizer": {"kind": "adamw_8bit"}}, {}),
        ("fsdp2", FREEZE, {}),
        ("fsdp2", engine(cpu_offload=True) | AVERAGE, {}),
        ("fsdp2", engine(reshard_after_forward=False, reduce_every_micro_batch=False), {}),
        ("zero1", FREEZE, {}),
        ("zero2", LORA, {}),
        ("zero3", BLOCK, {}),
        ("zero3", LORA | AVERAGE, {}),
    ],
    3: [
        ("fsdp2", AVERAGE, {}),
        ("fsdp2", {"optimizer": {"kind": "adamw_8bit"}}, {}),
        ("zero1", AVERAGE, {"overlap_comm": False}),
        ("zero2", AVERAGE, {"round_robin_gradients": True}),
        ("zero3", FREEZE, {"sub_group_size": 20_000} | NOTHING_KEPT),
        ("zero3", BLOCK, SOME_KEPT),
        ("zero3", LORA, NOTHING_KEPT),
        ("zero3", {"precision": {"mode": "fp32"}}, {"stage3_prefetch_bucket_size": 0}),
    ],
    4: [
        ("fsdp2-hybrid", BLOCK, {}),
        ("fsdp2", engine(sequence_parallel=2) | BLOCK, {}),
        ("zero2", engine(sequence_parallel=2), {}),
    ],
}


@pytest.mark.parametrize("world", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)])
def test_state_and_traffic_are_exact(world: int) -> None:
    by_rank = run_ranks(hold_and_send, world, CASES[world])
    wrong = []
    for number, case in enumerate(CASES[world]):
        job = job_of(case, world)
        held = {kind: max(found[number][0].get(kind, 0) for found in by_rank) for kind in by_rank[0][number][0]}
        sent = by_rank[0][number][1]
        if held != (expected := _held(job)):
            wrong.append(f"{case} holds {held}, planned {expected}")
        if sent != (planned := _sent(job)):
            wrong.append(f"{case} sends {sent}, planned {planned}")
    assert not wrong, "\n".join(wrong)


def _held(job: Job) -> dict[str, int]:
    """The planner's state in the words of `ParallelEngine.held`, which leaves out ZeRO's buckets and counters."""
    found = state(job)
    held = added([found.device, found.host])
    gradients = gradient_bytes(job)
    if job.kind in ("zero1", "zero2"):
        gradients = FP32 * flat_elements(job.trained, job.world) // job.world
    if job.zero is not None and job.kind == "zero1":
        # Those of other ranks are views of the buckets that they were sent from; there are two with overlapping.
        gradients += FP32 * job.zero.reduce_bucket * (2 if job.zero.overlap else 1)
    moments = held[Kind.MOMENTS]
    if job.kind.startswith("zero"):
        moments -= STEP_COUNTER * (len(sub_groups(job)) if job.kind == "zero3" else 1)
    named = {
        "parameters": held.get(Kind.PARAMETERS, 0),
        "gathered": held.get(Kind.GATHERED, 0),
        "masters": held[Kind.MASTERS],
        "moments": moments,
        "ema": held.get(Kind.EMA, 0),
        "gradients": gradients,
    }
    return {name: size for name, size in named.items() if size}


def _sent(job: Job) -> dict[str, int]:
    sent: dict[str, int] = {}
    for (operation, _), moved in traffic(job).items():
        name = operation.replace("_", "-")
        sent[name] = sent.get(name, 0) + moved.payload
    return sent
