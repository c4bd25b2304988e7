"""torch's own tracker of FSDP2's memory says the same of parameters, gradients, moments and buffers.

Its figure for moments is right here because AdamW works on plain local tensors; with an optimizer over DTensors under
pretended ranks it is not to be trusted.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.engines import problem
from qwen_edit_zero.planning.engines.fsdp_units import units
from qwen_edit_zero.planning.engines.kinds import Kind, Phase
from qwen_edit_zero.planning.engines.state import state
from qwen_edit_zero.planning.engines.transients import transients
from qwen_edit_zero.training.task import EditTask
from tests.planning import ranks_at_work
from tests.planning.ranks_at_work import Case
from tests.ranks import run_ranks

WORLD = 8
CONFIG = problem.transformer_config(width=256, layers=4)
CASE: Case = ("fsdp2", {"model": {"activation_checkpointing": "block"}}, {})


def track(rank: int, world: int) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes by the tracker's kinds after a backward pass, and at the peak; of one of eight pretended ranks."""
    dist.init_process_group("fake", rank=0, world_size=WORLD, store=FakeStore())
    ranks_at_work.CONFIG = CONFIG
    run = ranks_at_work.settings_of(CASE, WORLD)
    task = EditTask(problem.model_folder(CONFIG), run)
    batch = problem.batches(0, 0, 1)[0]
    engine: Any = ranks_at_work.build(run)
    with FSDPMemTracker(engine.module, engine._optimizer) as tracker:  # type: ignore[no-untyped-call]
        for step in range(2):
            problem.run_backward(engine, task, batch, is_last=True)
            after = _by_kind(tracker.get_tracker_snapshot("current"))
            engine.step(lr=1e-4)
            if step == 0:
                tracker.reset_mod_stats()  # type: ignore[no-untyped-call]
        return after, _by_kind(tracker.get_tracker_snapshot("peak"))


def _by_kind(snapshot: Any) -> dict[str, int]:
    sums: dict[str, int] = {}
    for kinds in snapshot.values():
        for kind, size in kinds.items():
            name = str(kind).rpartition(".")[2]
            sums[name] = sums.get(name, 0) + size
    return sums


def test_fsdp_mem_tracker_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_at_work, "CONFIG", CONFIG)
    after, peak = run_ranks(track, 1, init_process_group=False)[0]
    job = ranks_at_work.job_of(CASE, WORLD)
    held, beside = state(job).device, transients(job)
    root, blocks = units(job)
    assert peak["SHARDED_PARAM"] == held[Kind.MASTERS]
    assert peak["OPT"] == held[Kind.MOMENTS]
    assert after["SHARDED_GRAD"] == beside[Phase.BACKWARD].device[Kind.GRADIENTS]
    assert peak["ALL_GATHER"] == 2 * blocks[0].gathered
    assert peak["UNSHARDED_PARAM"] == 2 * (root.gathered + blocks[0].gathered)
    assert peak["REDUCE_SCATTER"] == 4 * max(block.reduced for block in blocks)
    assert peak["ALL_GATHER"] + peak["UNSHARDED_PARAM"] == beside[Phase.BACKWARD].device[Kind.GATHERED]
