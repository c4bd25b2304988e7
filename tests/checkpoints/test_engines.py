"""State goes through the disk from engine to engine and rank count to rank count without losing a bit."""

from __future__ import annotations

from pathlib import Path

import torch

from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.checkpoints.writer import save_checkpoint
from qwen_edit_zero.engines.factory import make_engine
from tests.checkpoints.states import MODEL
from tests.engines import harness, problem
from tests.ranks import run_ranks

CHAIN = [("zero3", 2), ("fsdp2", 3), ("zero2", 2), ("ddp", 1), ("zero1", 2), ("zero3", 1)]


def _save(rank: int, world: int, kind: str, source: Path | None, folder: Path, step: int) -> Path:
    """Train two steps from made-up weights, or load `source` over other weights; then save."""
    weights = problem.weights_of(problem.make_model())
    engine = make_engine(harness.engine_settings(kind), device=torch.device("cpu"))
    start = weights if source is None else {name: w + 1 for name, w in weights.items()}
    engine.setup(
        problem.make_engine_model(engine),
        optimizer=problem.OPTIMIZER,
        weights=harness.MemorySource.of_weights(start),
    )
    if source is None:
        problem.train_with(engine, micro=2, steps=range(2))
    else:
        with CheckpointReader(source) as reader:
            engine.load_state(reader, reader.run_state["engine"])
    path = save_checkpoint(
        folder, step=step, ranges=engine.local_state, run_state={"engine": engine.scalars()}, settings={}, model=MODEL,
        engine=engine.name,
    )  # fmt: skip
    engine.close()
    return path


def test_every_engine_hands_the_same_bits_on(tmp_path: Path) -> None:
    source = None
    for step, (kind, world) in enumerate(CHAIN):
        source = run_ranks(_save, world, kind, source, tmp_path, step)[0]
    with CheckpointReader(tmp_path / "step-00000000") as first:
        moved = problem.weights_of(problem.make_model())
        assert any(not torch.equal(first.read(n, 0, w.numel()), w.view(-1)) for n, w in moved.items())
        for step in range(1, len(CHAIN)):
            with CheckpointReader(tmp_path / f"step-{step:08d}") as other:
                label = f"{CHAIN[step - 1]} to {CHAIN[step]}"
                assert other.run_state == first.run_state, label
                assert {(t.kind, t.name) for t in other.manifest.tensors} == {
                    (t.kind, t.name) for t in first.manifest.tensors
                }, label
                for tensor in first.manifest.tensors:
                    count = torch.Size(tensor.shape).numel()
                    assert other.shape(tensor.name, tensor.kind) == tensor.shape
                    ours = other.read_bytes(tensor.name, 0, count, tensor.kind)
                    assert (ours == first.read_bytes(tensor.name, 0, count, tensor.kind)).all(), (
                        f"{label}: {tensor.name}"
                    )
