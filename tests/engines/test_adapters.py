"""LoRA under every engine: adapters train alike, the base stays, and their state travels between engines."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qwen_edit_zero.edit_model.lora import add_lora
from qwen_edit_zero.engines.base import ParallelEngine
from qwen_edit_zero.engines.factory import make_engine
from qwen_edit_zero.settings.models import LoraSettings
from tests.engines import harness, problem
from tests.ranks import run_ranks

LORA = LoraSettings(rank=2, targets=("attn.to_q", "attn.add_v_proj"))
STEPS = range(6)


def with_adapters() -> torch.nn.Module:
    model = problem.make_model()
    torch.manual_seed(0)
    add_lora(model.transformer, LORA)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)
    return model


def build(kind: str) -> ParallelEngine:
    engine = make_engine(harness.engine_settings(kind), device=harness.CPU)
    engine.setup(with_adapters(), optimizer=problem.OPTIMIZER, weights=None)
    return engine


def train_adapters(rank: int, world: int, kind: str, other: str) -> bytes:
    """Half of the training under `kind`, the other half under `other`."""
    engine = build(kind)
    losses, _ = problem.train_with(engine, micro=2, steps=STEPS[:3], poisoned_rank=0)
    state, scalars = harness.whole_state(engine), engine.scalars()
    engine.close()
    engine = build(other)
    engine.load_state(state, scalars)
    more, results = problem.train_with(engine, micro=2, steps=STEPS[3:])
    report: dict[str, Any] = {
        "losses": losses + more,
        "norm": results[-1].grad_norm,
        "state": state.tensors,
        "weights": dict(engine.full_weights()),
    }
    engine.close()
    return harness.packed(report)


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    model = with_adapters()
    losses, norms = problem.train_plainly(model, problem.OPTIMIZER, steps=STEPS)
    return {"losses": losses, "norm": norms[-1], "weights": problem.weights_of(model)}


@pytest.mark.parametrize(
    ("kind", "other"),
    [("ddp", "zero3"), ("fsdp2", "zero2"), ("zero1", "fsdp2"), ("zero2", "ddp"), ("zero3", "zero1")],
)
def test_adapters_train_alike_and_move_on(kind: str, other: str, plain: dict[str, Any]) -> None:
    reports = [harness.unpacked(r) for r in run_ranks(train_adapters, 2, kind, other)]
    losses = [sum(r["losses"][step] for r in reports) for step in STEPS]
    assert max(map(problem.relative, losses, plain["losses"])) < 1e-5
    assert problem.relative(reports[0]["norm"], plain["norm"]) < 1e-5
    assert problem.largest_deviation(reports[0]["weights"], plain["weights"]) < 1e-5
    start = problem.weights_of(with_adapters())
    for report in reports:
        assert all(".lora_" in name for name in report["state"]["param"])  # the base is not saved,
        for name, tensor in report["weights"].items():
            assert ".lora_" in name or tensor.equal(start[name])  # and has not moved
