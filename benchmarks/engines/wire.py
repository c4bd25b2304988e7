"""Bytes on the wire a step, counted at the collectives, beside the formulas and what DeepSpeed does by default."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.engines import problem
from benchmarks.engines.census import WireCensus
from benchmarks.engines.problem import Sizes
from benchmarks.engines.tables import Table
from qwen_edit_zero.training.task import EditTask
from tests.ranks import run_ranks

CONFIG = problem.transformer_config(width=256, layers=4)
# Nothing stays gathered from one use to the next. (As shipped, up to 1 G elements do, which is more than this model.)
NOTHING_KEPT = {"stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 1}
Formula = Callable[[Sizes], int]
# engine: ranks, {kind of collective: (formula, its value)}, ring transfers a byte of payload and rank
CASES: dict[str, tuple[int, dict[str, tuple[str, Formula]]]] = {
    "ddp": (2, {"all-reduce": ("4 N + 4 T", lambda s: 4 * s.whole + 4 * s.tensors)}),
    "fsdp2": (
        2,
        {
            "all-gather": ("2 (2 N_blocks + R)", lambda s: 2 * (2 * s.blocks + s.root)),
            "reduce-scatter": ("4 (N - U)", lambda s: 4 * (s.whole - s.without_gradient)),
        },
    ),
    "fsdp2-hybrid": (
        4,
        {
            "all-gather": ("2 (2 N_blocks + R)", lambda s: 2 * (2 * s.blocks + s.root)),
            "reduce-scatter": ("4 (N - U)", lambda s: 4 * (s.whole - s.without_gradient)),
            "all-reduce": ("4 (N - U)/S", lambda s: 2 * (s.whole - s.without_gradient)),
        },
    ),
    "zero1": (
        2,
        {
            "reduce": ("4 (N - U)", lambda s: 4 * (s.whole - s.without_gradient)),
            "all-gather": ("2 N", lambda s: 2 * s.whole),
        },
    ),
    "zero3": (
        2,
        {
            "all-gather": ("2 (2 (N - P) + P)", lambda s: 2 * (2 * (s.whole - s.persistent) + s.persistent)),
            "reduce-scatter": ("4 (N - U)", lambda s: 4 * (s.whole - s.without_gradient)),
        },
    ),
}
CASES["zero2"] = CASES["zero1"]


def count(rank: int, world: int, kind: str) -> dict[str, dict[str, int]]:
    """Payload bytes and calls of the third step, one micro-batch."""
    folder = problem.model_folder(CONFIG)
    run = problem.settings(kind, **(NOTHING_KEPT if kind == "zero3" else {}))
    task = EditTask(folder, run)
    engine = problem.build(folder, run)
    for step in range(3):
        with WireCensus() as census:
            problem.run_backward(engine, task, problem.batches(step, rank, 1)[0], is_last=True)
            engine.step(lr=1e-4)
    engine.close()
    return {"bytes": dict(census.bytes), "calls": dict(census.calls)}

if __name__ == "__main__":
    for kind, (ranks, formulas) in CASES.items():
        found = run_ranks(count, ranks, kind)
        s = problem.sizes(CONFIG)
        print(kind, found[0], {k: f[1](s) for k, f in formulas.items()})
