"""Any engine on any number of ranks goes on from the checkpoint of any other: all pairs, through the disk.

Weights, moments and the running average are compared bit for bit, and every counter: parameters have done different
numbers of optimizer steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qwen_edit_zero.checkpoints.layout import checkpoint_name
from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.checkpoints.writer import save_checkpoint
from tests.checkpoints.states import MODEL
from tests.engines import harness, problem, uneven
from tests.engines.harness import MemorySource
from tests.ranks import run_ranks

SHAPES = [(kind, world) for kind in harness.EVERY_ENGINE for world in (1, 2, 3, 4)] + [("fsdp2-hybrid", 4)]
SAVED_AFTER, END = 5, 15  # ten steps after the checkpoint, a short one among them
TOLERANCE = 1e-5
OPTIMIZER = problem.OPTIMIZER.model_copy(update={"ema": 0.7, "ema_warmup": True})


def micro(world: int) -> int:
    return 12 // world


def uninterrupted(rank: int, world: int, kind: str, folder: Path, number: int) -> bytes:
    """Train, save on the way, go on. Returns the state that was saved and this rank's losses after it."""
    engine = harness.build(kind, MemorySource.of_weights(weights()), optimizer=OPTIMIZER)
    engine.load_state(MemorySource(uneven.state()), uneven.SCALARS)
    problem.train_with(engine, micro=micro(world), steps=range(SAVED_AFTER), poisoned_rank=0)
    save_checkpoint(
        folder, step=number, ranges=engine.local_state, run_state={"engine": engine.scalars()}, settings={},
        model=MODEL, engine=engine.name,
    )  # fmt: skip
    state, scalars = harness.whole_state(engine).tensors, engine.scalars()
    losses, _ = problem.train_with(engine, micro=micro(world), steps=range(SAVED_AFTER, END))
    engine.close()
    return harness.packed((state if rank == 0 else None, scalars, losses))


def resumed(rank: int, world: int, kind: str, folder: Path, count: int) -> bytes:
    """Go on from each checkpoint in turn. Returns what was held after loading (rank 0) and this rank's losses."""
    reports = []
    start = MemorySource.of_weights({n: w + 1 for n, w in weights().items()})
    engine = harness.build(kind, start, optimizer=OPTIMIZER)
    for number in range(count):
        with CheckpointReader(folder / checkpoint_name(number)) as reader:
            engine.load_state(reader, reader.run_state["engine"])
        held = harness.whole_state(engine).tensors
        scalars = engine.scalars()
        losses, _ = problem.train_with(engine, micro=micro(world), steps=range(SAVED_AFTER, END))
        reports.append((held if rank == 0 else None, scalars, losses))
    engine.close()
    return harness.packed(reports)


def weights() -> dict[str, torch.Tensor]:
    return problem.weights_of(problem.make_model())


def summed(by_rank: list[list[float]]) -> list[float]:
    return [sum(step) for step in zip(*by_rank, strict=True)]


def differing(found: dict[str, Any], expected: dict[str, Any]) -> int:
    """Elements that are not the same to the bit."""
    assert {kind: set(tensors) for kind, tensors in found.items()} == {k: set(t) for k, t in expected.items()}
    return sum(
        int((found[kind][name].view(torch.int32) != tensor.view(torch.int32)).sum())
        for kind, tensors in expected.items()
        for name, tensor in tensors.items()
    )


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_pair_of_engines_and_rank_counts_goes_on_exactly(tmp_path: Path) -> None:
    saved = []
    for number, (kind, world) in enumerate(SHAPES):
        reports = [harness.unpacked(r) for r in run_ranks(uninterrupted, world, kind, tmp_path, number)]
        saved.append((reports[0][0], reports[0][1], summed([r[2] for r in reports])))
    pairs, elements, worst = 0, 0, 0.0
    for kind, world in SHAPES:
        by_rank = [harness.unpacked(r) for r in run_ranks(resumed, world, kind, tmp_path, len(SHAPES), timeout=900)]
        for source, (state, scalars, expected) in enumerate(saved):
            label = f"{SHAPES[source]} to {(kind, world)}"
            held, held_scalars, _ = by_rank[0][source]
            losses = summed([report[source][2] for report in by_rank])
            assert differing(held, state) == 0, label
            assert held_scalars == scalars, label
            assert scalars["ema_updates"] == SAVED_AFTER - 1  # but for the step that was skipped
            assert scalars["parameter_steps"] == {n: count + SAVED_AFTER - 1 for n, count in uneven.BEHIND.items()}
            if SHAPES[source] == (kind, world):
                assert losses == expected, label
            deviation = max(map(problem.relative, losses, expected))
            assert deviation < TOLERANCE, f"{label}: {deviation}"
            pairs, worst = pairs + 1, max(worst, deviation)
            elements += sum(tensor.numel() for tensors in state.values() for tensor in tensors.values())
    print(f"{pairs} pairs, {elements:,} elements compared, none differs; losses of the next 10 steps to {worst:.1e}")
