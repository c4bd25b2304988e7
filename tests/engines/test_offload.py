"""State in host memory changes memory and speed, not results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.engines import harness, problem
from tests.engines.problem import OPTIMIZER
from tests.engines.test_options import courses
from tests.ranks import run_ranks


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = problem.make_model()
    losses, _ = problem.train_plainly(model, OPTIMIZER)
    return losses, problem.weights_of(model)


# Those of DeepSpeed compile its Adam for CPUs: two minutes the first time.
@pytest.mark.parametrize(
    ("kind", "world", "settings"),
    [
        ("fsdp2", 3, {"cpu_offload": True}),
        ("fsdp2-hybrid", 4, {"cpu_offload": True}),
        pytest.param("zero2-offload", 2, {}, marks=pytest.mark.slow),
        pytest.param("zero3-offload", 2, {}, marks=pytest.mark.slow),
    ],
)
def test_offloading_leaves_results_alone(
    kind: str, world: int, settings: dict[str, Any], plain: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    losses, weights, applied = courses(world, kind, **settings)
    assert applied[:5] == [True, True, False, True, True]  # it comes back from a skipped step
    assert max(map(problem.relative, losses, plain[0])) < 1e-5
    assert problem.largest_deviation(weights, plain[1]) < 1e-5


def offloaded_and_not(rank: int, world: int) -> bytes:
    found = []
    for offload in (False, True):
        engine = harness.build("fsdp2", None, frozen=True, precision="bf16", cpu_offload=offload)
        losses, results = problem.train_with(engine, micro=2, steps=range(2))
        with engine.eval_mode():
            losses.append(problem.loss_sum(engine.forward, problem.samples(9, 1)).item())
        found.append((losses, [r.grad_norm for r in results], harness.whole_state(engine).tensors))
        engine.close()
    return harness.packed(found)


def test_fsdp2_offloaded_is_the_same_to_the_bit() -> None:
    """In bf16, with frozen parameters and an evaluation, on the same kind of device."""
    for here, offloaded in map(harness.unpacked, run_ranks(offloaded_and_not, 2)):
        assert here[:2] == offloaded[:2]
        assert harness.MemorySource(here[2]) == harness.MemorySource(offloaded[2])
