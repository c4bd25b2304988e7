"""A step that is vetoed has not been, under every engine."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.engines import harness, problem
from tests.engines.harness import EVERY_ENGINE, MemorySource
from tests.ranks import run_ranks


def vetoed(rank: int, world: int, kind: str, precision: str) -> tuple[bool, bool, list[Any]]:
    start = MemorySource.of_weights(problem.weights_of(problem.make_model()))
    asked: list[float] = []

    def refuse(norm: float) -> bool:
        asked.append(norm)
        return True

    states = []
    for steps in (range(3), range(2)):
        engine = harness.build(kind, start, precision=precision)
        problem.train_with(engine, micro=2, steps=range(2))
        before = harness.whole_state(engine), engine.scalars()
        if len(steps) == 3:
            engine.veto = refuse
            _, results = problem.train_with(engine, micro=2, steps=range(2, 3))
            engine.veto = None
            unchanged = before[0] == harness.whole_state(engine) and before[1] == engine.scalars()
        problem.train_with(engine, micro=2, steps=range(4, 6))
        states.append((harness.whole_state(engine), engine.scalars()))
        engine.close()
    result = results[0]
    told = [result.applied, result.vetoed, result.non_finite, len(asked)]
    assert math.isclose(result.grad_norm, asked[0])
    return unchanged, states[0][0] == states[1][0] and states[0][1] == states[1][1], told


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", EVERY_ENGINE)
def test_a_vetoed_step_leaves_no_trace(kind: str, precision: str) -> None:
    for unchanged, same_course, told in run_ranks(vetoed, 2, kind, precision):
        assert told == [False, True, (), 1]
        assert unchanged
        assert same_course, "the steps after it are as without it"
