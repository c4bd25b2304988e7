"""Bytes on the wire a step, counted at the collectives, beside the formulas and what DeepSpeed does by default."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.engines import peers, problem
from benchmarks.engines.census import WireCensus
from benchmarks.engines.problem import Sizes
from benchmarks.engines.tables import Table
from qwen_edit_zero.training.task import EditTask
from tests.ranks import run_ranks

CONFIG = problem.transformer_config(width=256, layers=4)
# Nothing stays gathered from one use to the next. (As shipped, up to 1 G elements do, which is more than this model.)
NOTHING_KEPT: dict[str, Any] = {"stage3_max_live_parameters": 1, "stage3_max_reuse_distance": 1}
Formula = Callable[[Sizes], int]
# engine: ranks, {kind of collective: (formula, its value)}
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
            "all-gather": (
                "2 (2 (N - P) + P - G)",
                lambda s: 2 * (2 * (s.whole - s.persistent) + s.persistent - s.gathered_once),
            ),
            "reduce-scatter": ("4 (N - U)", lambda s: 4 * (s.whole - s.without_gradient)),
        },
    ),
}
CASES["zero2"] = CASES["zero1"]
# Beside it, DeepSpeed without us: the shipped JSON with buckets as DeepSpeed reduces them, and no JSON but a stage.
DEFAULTS = {
    "DeepSpeed, zero2.json with DeepSpeed's own way of reducing": problem.deepspeed_config(
        "zero2", use_multi_rank_bucket_allreduce=True
    ),
    "DeepSpeed, ZeRO-2 and nothing else said (gradients in bf16)": {"zero_optimization": {"stage": 2}},
    "the same, use_multi_rank_bucket_allreduce off": {
        "zero_optimization": {"stage": 2, "use_multi_rank_bucket_allreduce": False}
    },
}
TRANSFERS = {"all-reduce": 2}  # of each byte of payload in a ring, times (W - 1)/W; 1 in all other collectives


def measure() -> list[Table]:
    """Payloads of every collective, and the totals a ring would transfer."""
    s = problem.sizes(CONFIG)
    rows: list[list[object]] = []
    totals: list[list[object]] = []
    for kind in ("ddp", "fsdp2", "fsdp2-hybrid", "zero1", "zero2", "zero3"):
        ranks, formulas = CASES[kind]
        found = _same(run_ranks(count, ranks, kind))
        for collective in sorted(found.bytes.keys() - {"small"} | formulas.keys()):
            formula, value = formulas.get(collective, ("none", lambda s: 0))
            payload, expected = found.bytes[collective], value(s)
            verdict = "exact" if payload == expected else f"{payload - expected:+,}"
            rows.append([kind, ranks, collective, found.calls[collective], payload, formula, expected, verdict])
        rows.append([kind, ranks, "norm and flags", found.calls["small"], found.bytes["small"], "", "", ""])
        totals.append(_total(kind, found, s))
    for name, config in DEFAULTS.items():
        totals.append(_total(name, _same(run_ranks(count_raw, 2, config)), s))
    notes = (
        f"Payload: output of an all-gather, input of a reduce-scatter, the tensor that is reduced. Parameters travel "
        f"in bf16, gradients in fp32. N = {s.whole:,}, R = {s.root:,} outside of blocks, U = {s.without_gradient:,} "
        f"without gradient, T = {s.tensors} tensors (DDP's map of unused ones), P = {s.persistent:,} always gathered, "
        f"G = {s.gathered_once:,} gathered in forward only (U's matrices; the last layer, whose backward comes at "
        f"once), S = 2 ranks in a shard group. One micro-batch; each further one adds all of it again under FSDP2 "
        f"and ZeRO-3 (but for ZeRO-3's P), the reduction under ZeRO-2, nothing under DDP and ZeRO-1. ZeRO-3 with "
        f"stage3_max_live_parameters = 1, so that nothing stays gathered from forward to backward; as shipped, up to "
        f"1 G elements do, which saves up to 2 GB of the backward's all-gather."
    )
    columns = ["engine", "ranks", "collective", "calls", "payload, bytes", "formula", "= bytes", "found"]
    ring = (
        "Sum of payloads, all-reduces twice, as a ring transfers them; times (W - 1)/W. The last three lines are raw "
        "DeepSpeed. Its default all-reduces every bucket: 1.5 times the bytes if gradients travel in bf16, and 1.67 "
        "times in fp32."
    )
    return [
        Table("Collectives of a step", columns, rows, notes),
        Table("Transferred by each rank in a step", ["engine", "bytes", "in N"], totals, ring),
    ]


@dataclass(frozen=True)
class Traffic:
    """Payload bytes and calls by kind of collective."""

    bytes: Counter[str]
    calls: Counter[str]


def count(rank: int, world: int, kind: str) -> Traffic:
    """What a rank's third step sends under our engine."""
    folder = problem.model_folder(CONFIG)
    run = problem.settings(kind, **(NOTHING_KEPT if kind == "zero3" else {}))
    task = EditTask(folder, run)
    engine = problem.build(folder, run)
    for step in range(3):
        with WireCensus() as census:
            problem.run_backward(engine, task, problem.batches(step, rank, 1)[0], is_last=True)
            engine.step(lr=1e-4)
    engine.close()
    return Traffic(census.bytes, census.calls)


def count_raw(rank: int, world: int, config: dict[str, Any]) -> Traffic:
    """The same under raw DeepSpeed."""
    loop = peers.RawDeepSpeed(problem.model_folder(CONFIG), problem.settings("zero2"), 1, config)
    for step in range(3):
        with WireCensus() as census:
            loop.step(step, problem.batches(step, rank, 1))
    loop.close()
    return Traffic(census.bytes, census.calls)


def _same(traffic: list[Traffic]) -> Traffic:
    assert all(other == traffic[0] for other in traffic), "ranks differ"
    return traffic[0]


def _total(name: str, found: Traffic, s: Sizes) -> list[object]:
    total = sum(payload * TRANSFERS.get(collective, 1) for collective, payload in found.bytes.items())
    return [name, total, f"{total / s.whole:.2f}"]
