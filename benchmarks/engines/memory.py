"""Memory of a rank: live tensor storage after a step and after a backward, beside the formulas."""

from __future__ import annotations

from benchmarks.engines import problem
from benchmarks.engines.census import MemoryCensus
from benchmarks.engines.problem import BUCKET
from benchmarks.engines.tables import Table
from qwen_edit_zero.training.task import EditTask
from tests.ranks import run_ranks

CONFIG = problem.transformer_config(width=256, layers=4)
CASES = [("ddp", 2), *((kind, ranks) for kind in ("fsdp2", "zero1", "zero2", "zero3") for ranks in (2, 4))]
CASES.insert(3, ("fsdp2-hybrid", 4))
CASES += [("ddp+ema", 2), ("fsdp2+ema", 2), ("zero2+ema", 4), ("zero3+ema", 2)]
BETWEEN, BACKWARD, STEP = "after a backward, not the last", "after the last backward", "after a step"


def measure() -> list[Table]:
    """Every engine on 2 and 4 ranks, in bf16."""
    rows = []
    for kind, ranks in CASES:
        counts = run_ranks(take_census, ranks, kind)
        for moment, (formula, expected) in formulas(kind, ranks).items():
            found = max(count[moment] for count in counts)
            rows.append([kind, ranks, moment, found, formula, expected, f"{found / expected - 1:+.3%}"])
    s = problem.sizes(CONFIG)
    notes = (
        f"N = {s.whole:,} parameters, U = {s.without_gradient:,} of them without gradient (the last block's text "
        f"branch; 0.4 % of the full-size model), R = {s.root:,} outside of blocks, P = {s.persistent:,} in biases and "
        f"norms, W ranks, S = 2 ranks in a shard group, B = {BUCKET:,} elements in a bucket. The largest rank. Without "
        f"the position tables (1 MB whatever the model). bf16; micro-batches of one sample; storage counted over all "
        f"live tensors of the process."
    )
    return [Table("Memory a rank", ["engine", "ranks", "moment", "bytes", "formula", "= bytes", "off by"], rows, notes)]


def take_census(rank: int, world: int, kind: str) -> dict[str, int]:
    """Bytes alive at each moment, position tables aside."""
    engine_kind, _, averaged = kind.partition("+")
    folder, run = problem.model_folder(CONFIG), problem.settings(engine_kind, ema=0.999 if averaged else None)
    task = EditTask(folder, run)
    data = problem.batches(0, rank, 2)
    census = MemoryCensus()
    engine = problem.build(folder, run)
    found = {}

    def note(moment: str) -> None:
        counts = census.count()
        counts.pop("complex64")  # the position tables
        found[moment] = sum(counts.values())

    for _ in range(2):
        problem.run_backward(engine, task, data[0], is_last=False)
        note(BETWEEN)
        problem.run_backward(engine, task, data[1], is_last=True)
        note(BACKWARD)
        engine.step(lr=1e-4)
        note(STEP)
    engine.close()
    return found


def formulas(kind: str, ranks: int) -> dict[str, tuple[str, float]]:
    """For each moment, the formula and its value in bytes; `+ema` behind the engine is for a running average."""
    kind, _, averaged = kind.partition("+")
    if averaged:
        w, held = ("", 1) if kind == "ddp" else ("/W", ranks)
        more = 4 * problem.sizes(CONFIG).whole / held
        return {
            moment: (f"{formula} + 4 N{w}", expected + more)
            for moment, (formula, expected) in formulas(kind, ranks).items()
        }
    s = problem.sizes(CONFIG)
    n, unused, shards = s.whole, s.without_gradient, 2 if kind == "fsdp2-hybrid" else ranks
    if kind == "ddp":
        return {
            BACKWARD: ("16 N", 16 * n),
            # DDP's buckets are the gradients, and they stay
            STEP: ("16 N", 16 * n),
        }
    if kind.startswith("fsdp2"):
        w = "S" if kind == "fsdp2-hybrid" else "W"
        return {
            # FSDP2 holds the last reduced buffer until the next backward, or the last one
            BETWEEN: (f"16 N/{w} - 4 U/{w} + 4 R", (16 * n - 4 * unused) / shards + 4 * s.root),
            BACKWARD: (f"16 N/{w} - 4 U/{w}", (16 * n - 4 * unused) / shards),
            STEP: (f"12 N/{w}", 12 * n / shards),
        }
    if kind == "zero1":
        return {
            BETWEEN: ("2 N + 12 N/W + 4 (N - U) + 8 B", 6 * n + 12 * n / ranks - 4 * unused + 8 * BUCKET),
            STEP: ("2 N + 12 N/W", 2 * n + 12 * n / ranks),
        }
    if kind == "zero2":
        return {
            BETWEEN: ("2 N + 16 N/W", 2 * n + 16 * n / ranks),
            BACKWARD: ("2 N + 16 N/W", 2 * n + 16 * n / ranks),
            STEP: ("2 N + 12 N/W", 2 * n + 12 * n / ranks),
        }
    always = 18 * n / ranks + 4 * BUCKET + 2 * s.persistent
    return dict.fromkeys((BETWEEN, BACKWARD, STEP), ("18 N/W + 4 B + 2 P", always))
