"""Peaks of memory in forward, backward and step: planned beside what tensors take on CPU ranks.

What is planned adds peaks that need not come together, so it may be more than what is measured, seldom less.
"""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.engines import problem
from qwen_edit_zero.planning.engines.kinds import Phase, total
from qwen_edit_zero.planning.engines.state import state
from qwen_edit_zero.planning.engines.transients import transients
from qwen_edit_zero.planning.passes.activations import activations
from qwen_edit_zero.training.task import EditTask
from tests.planning import ranks_at_work
from tests.planning.ranks_at_work import Case
from tests.ranks import run_ranks

CONFIG = problem.transformer_config(width=256, layers=4)
POSITIONS = 1 << 20  # bytes of the tables of rotary positions
BLOCK = {"model": {"activation_checkpointing": "block"}}
BUCKETS = {"reduce_bucket_size": 1_200_000, "allgather_bucket_size": 1_200_000}
LIVE = {
    "reduce_bucket_size": 1_200_000,
    "stage3_prefetch_bucket_size": 1_200_000,
    "stage3_max_live_parameters": 6_000_000,
    "stage3_max_reuse_distance": 6_000_000,
}
TORCH_CASES: list[Case] = [
    ("fsdp2", BLOCK | {"engine": options}, {})
    for options in ({}, {"reshard_after_forward": False}, {"prefetch_blocks": 2}, {"reduce_every_micro_batch": False})
]
GLOO_CASES: list[Case] = [
    ("ddp", BLOCK, {}),
    ("zero1", BLOCK, BUCKETS),
    ("zero2", BLOCK, BUCKETS),
    ("zero2", BLOCK, BUCKETS | {"overlap_comm": False}),
    ("zero3", BLOCK, LIVE),
]


class PeakCensus(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes of storage alive at once; storages may be resized, as FSDP2 does to release parameters."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def forget(self) -> None:
        """Begin anew, without what only reference cycles keep alive."""
        gc.collect()
        self.peak = 0

    def live(self) -> int:
        return sum(s.nbytes() for s in (known() for known in list(self._known.values())) if s is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if type(tensor) is torch.Tensor and not tensor.is_meta:
                storage = tensor.untyped_storage()
                key = storage._cdata
                if key not in self._known:
                    self._known[key] = weakref.ref(storage)
                    weakref.finalize(storage, self._known.pop, key, None)
        self.peak = max(self.peak, self.live())
        return out


def peaks(rank: int, world: int, cases: list[Case], pretended: int | None) -> list[dict[Phase, int]]:
    """Of the second step of each case. With `pretended`, one process is rank 0 of so many that only seem to be there:
    collectives take no memory of their own."""
    if pretended is not None:
        dist.init_process_group("fake", rank=0, world_size=pretended, store=FakeStore())
        world = pretended
    ranks_at_work.CONFIG = CONFIG
    found = []
    for case in cases:
        run = ranks_at_work.settings_of(case, world)
        task = EditTask(problem.model_folder(CONFIG), run)
        data = problem.batches(0, rank, ranks_at_work.ACCUMULATION)
        with PeakCensus() as census:
            engine = ranks_at_work.build(run)
            for _ in range(3):
                highest = dict.fromkeys((Phase.FORWARD, Phase.BACKWARD), 0)
                for number, batch in enumerate(data):
                    with engine.micro_step(is_last=number == len(data) - 1):
                        census.forget()
                        loss = task.losses(engine.forward, batch).sum()
                        highest[Phase.FORWARD] = max(highest[Phase.FORWARD], census.peak)
                        census.forget()
                        engine.backward(loss)
                        del loss
                        highest[Phase.BACKWARD] = max(highest[Phase.BACKWARD], census.peak)
                census.forget()
                engine.step(lr=1e-4)
                highest[Phase.STEP] = census.peak
        found.append(highest)
        engine.close()
        del engine, task
        gc.collect()
    return found


def ratios(case: Case, world: int, measured: dict[Phase, int]) -> dict[Phase, float]:
    """Planned over measured bytes, less 1."""
    job = ranks_at_work.job_of(case, world)
    held, beside, computing = state(job), transients(job), activations(job, on_gpu=False)
    base = total(held.device) + total(held.host) + POSITIONS
    more = {Phase.FORWARD: computing.forward_peak, Phase.BACKWARD: computing.backward_peak, Phase.STEP: 0}
    planned = {}
    for phase, size in more.items():
        found = beside.get(phase)
        planned[phase] = base + size + (total(found.device) + total(found.host) if found else 0)
    return {phase: planned[phase] / size - 1 for phase, size in measured.items()}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["fsdp2", "ddp and zero"])
def test_peaks_are_planned(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On gloo, collectives take buffers of their own, which are not planned: hence FSDP2 with pretended ranks."""
    monkeypatch.setattr(ranks_at_work, "CONFIG", CONFIG)
    if kind == "fsdp2":
        cases, world = TORCH_CASES, 4
        by_rank = run_ranks(peaks, 1, cases, world, init_process_group=False)
    else:
        cases, world = GLOO_CASES, 2
        by_rank = run_ranks(peaks, world, cases, None, timeout=400)
    wrong = []
    for number, case in enumerate(cases):
        measured = {phase: max(found[number][phase] for found in by_rank) for phase in by_rank[0][number]}
        for phase, ratio in ratios(case, world, measured).items():
            print(f"{case[0]:6} {case[1:]} {phase}: planned {ratio:+.1%}")
            if not -0.03 < ratio < 0.13:
                wrong.append(f"{case}: {phase} {ratio:+.1%} of {measured[phase]:,}")
    assert not wrong, "\n".join(wrong)
