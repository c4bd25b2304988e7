"""Time of a step beside hand-written loops and other libraries on the same engines, interleaved."""

from __future__ import annotations

import importlib.util
import statistics
import time

import torch.distributed as dist

from benchmarks.engines import peers, problem
from benchmarks.engines.tables import Table
from tests.ranks import run_ranks

CONFIG = problem.transformer_config(width=384, layers=4)
BUCKET = 2_000_000
ACCUMULATION, WARM_UP = 2, 2
ROUNDS = 41
RANKS = 2
CONTENDERS: dict[str, list[tuple[str, type[peers.Loop]]]] = {
    "fsdp2": [
        ("hand-written", peers.RawFSDP2),
        ("ours", peers.Ours),
        ("accelerate", peers.Accelerate),
        ("Lightning Fabric", peers.Fabric),
    ],
    "zero2": [
        ("hand-written", peers.RawDeepSpeed),
        ("ours", peers.Ours),
        ("accelerate", peers.Accelerate),
    ],
    "zero3": [
        ("hand-written", peers.RawDeepSpeed),
        ("ours", peers.Ours),
        ("accelerate", peers.Accelerate),
    ],
}


def measure(rounds: int = ROUNDS) -> list[Table]:
    """Medians over rounds of each round's ratio to the hand-written loop."""
    rows: list[list[object]] = []
    for kind in CONTENDERS:
        times, cpu_times, losses = run_ranks(race, RANKS, kind, rounds, timeout=600)[0]
        for name, seconds in times.items():
            ratios = sorted(_ratios(times, name))
            cpu_ratio = statistics.median(_ratios(cpu_times, name))
            apart = max(abs(ratio - 1) for ratio in _ratios(losses, name))
            quartiles = f"{ratios[len(ratios) // 4]:.3f} to {ratios[-1 - len(ratios) // 4]:.3f}"
            rows.append(
                [
                    kind,
                    name,
                    f"{1000 * statistics.median(seconds):.0f}",
                    f"{statistics.median(ratios):.3f}",
                    quartiles,
                    f"{1000 * statistics.median(cpu_times[name]):.0f}",
                    f"{cpu_ratio:.3f}",
                    f"{apart:.0e}" if apart else "0",
                ]
            )
    notes = (
        f"{problem.sizes(CONFIG).whole / 1e6:.0f} M parameters, {RANKS} ranks of one thread, {ACCUMULATION} "
        f"micro-batches of one sample a rank, bf16, no activation checkpointing, the same micro-batches and JSON for "
        f"all. A round is one step of each, beginning with another one each time; ratios are taken within a round; "
        f"median of {rounds} rounds after {WARM_UP}. Ours includes metrics.jsonl, TensorBoard, the progress line, FLOP "
        f"counting and the check for non-finite gradients. Every loop sums its loss over the ranks. CPU ms: of rank "
        f"0's process, which other programs on the machine disturb less."
    )
    columns = ["engine", "loop", "ms", "ratio", "quartiles of it", "CPU ms", "CPU ratio", "losses apart"]
    return [Table("Overhead of a step", columns, rows, notes)]


Series = dict[str, list[float]]  # a value a round, by loop


def _ratios(series: Series, name: str) -> list[float]:
    return [own / other for own, other in zip(series[name], series["hand-written"], strict=True)]


def race(rank: int, world: int, kind: str, rounds: int) -> tuple[Series, Series, Series]:
    """Seconds, CPU seconds of this process, and losses of every loop in every round."""
    folder, run = problem.model_folder(CONFIG), problem.settings(kind, bucket=BUCKET)
    loops = {
        name: make(folder, run, ACCUMULATION)
        for name, make in CONTENDERS[kind]
        if make is not peers.Fabric or importlib.util.find_spec("lightning_fabric")
    }
    names = list(loops)
    times: Series = {name: [] for name in names}
    cpu_times: Series = {name: [] for name in names}
    losses: Series = {name: [] for name in names}
    for step in range(WARM_UP + rounds):
        batches = problem.batches(step, rank, ACCUMULATION)
        first = step % len(names)
        for name in names[first:] + names[:first]:
            dist.barrier()
            began, cpu_began = time.perf_counter(), time.process_time()
            loss = loops[name].step(step, batches)
            dist.barrier()
            if step >= WARM_UP:
                times[name].append(time.perf_counter() - began)
                cpu_times[name].append(time.process_time() - cpu_began)
            losses[name].append(loss)
    for loop in loops.values():
        loop.close()
    return times, cpu_times, losses
