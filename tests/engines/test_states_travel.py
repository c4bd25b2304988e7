"""A state written by any engine on any number of ranks is read by any other, to the bit, and training goes on."""

from __future__ import annotations

from typing import Any

from tests.engines import harness, problem
from tests.engines.harness import MemorySource
from tests.ranks import run_ranks

# Each stop reads what the one before wrote. Between them every engine reads from and writes for another world size.
JOURNEY = [("ddp", 2), ("zero3", 3), ("fsdp2", 2), ("zero1", 3), ("fsdp2-hybrid", 4), ("zero2", 2), ("ddp", 3)]


def first_half(rank: int, world: int) -> bytes:
    engine = harness.build("fsdp2", None)
    problem.train_with(engine, micro=2, steps=range(2))
    return harness.packed((harness.whole_state(engine), engine.scalars()))


def stop(rank: int, world: int, kind: str, packed_state: bytes) -> bytes:
    state, scalars = harness.unpacked(packed_state)
    engine = harness.build(kind, MemorySource.of_weights(problem.weights_of(problem.make_model())))
    engine.load_state(state, scalars)
    written, written_scalars = harness.whole_state(engine), engine.scalars()
    losses, results = problem.train_with(engine, micro=2, steps=range(3, 5))
    engine.close()
    return harness.packed(((written, written_scalars), losses, [r.grad_norm for r in results]))


def test_state_survives_a_journey_through_all_engines() -> None:
    departed: bytes = run_ranks(first_half, 1)[0]
    state, scalars = harness.unpacked(departed)
    assert scalars == {"optimizer_steps": 2}
    assert state.tensors["exp_avg_sq"]["before.weight"].all()

    courses: dict[tuple[str, int], tuple[list[float], list[float]]] = {}
    baggage: Any = departed
    for kind, world in JOURNEY:
        stops = [harness.unpacked(r) for r in run_ranks(stop, world, kind, baggage)]
        written = stops[0][0]
        assert written == (state, scalars), f"{kind} on {world} ranks changed the state"
        baggage = harness.packed(written)
        losses = [sum(step) for step in zip(*(s[1] for s in stops), strict=True)]
        courses[kind, world] = losses, stops[0][2]

    expected_losses, expected_norms = courses["ddp", 2]
    for losses, norms in courses.values():
        assert max(map(problem.relative, losses, expected_losses)) < 1e-5
        assert max(map(problem.relative, norms, expected_norms)) < 1e-5
