"""AdamW with 8-bit moments: near AdamW, saved in the common format, and exact where blocks lie as before."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from qwen_edit_zero.engines.adamw import check_optimizer, flat_moments, make_optimizer, prime_state
from qwen_edit_zero.engines.base import ParallelEngine
from qwen_edit_zero.engines.factory import make_engine
from qwen_edit_zero.engines.quantized import BLOCK, SMALLEST, QuantizedMoment, quantize
from qwen_edit_zero.engines.shards import MOMENTS
from qwen_edit_zero.engines.zero.config import complete_config
from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.models import OptimizerSettings, Settings
from tests.engines import harness, problem
from tests.engines.harness import MemorySource
from tests.ranks import run_ranks

EIGHT_BIT = problem.OPTIMIZER.model_copy(update={"kind": "adamw_8bit"})
HEADS = 8  # wide enough for parameters that are quantised
STEPS = range(6)


def build(kind: str, optimizer: OptimizerSettings = EIGHT_BIT) -> ParallelEngine:
    engine = make_engine(harness.engine_settings(kind), device=harness.CPU)
    engine.setup(problem.make_model(heads=HEADS), optimizer=optimizer, weights=None)
    return engine


def course(rank: int, world: int, kind: str, optimizer: OptimizerSettings, interrupted: bool) -> bytes:
    """Losses, gradient norms, steps applied and the state at the end; optionally by way of a saved state."""
    engine = build(kind, optimizer)
    losses, results = problem.train_with(engine, micro=2, steps=STEPS[:3], poisoned_rank=0)
    if interrupted:
        state, scalars = harness.whole_state(engine), engine.scalars()
        engine.close()
        engine = build(kind, optimizer)
        engine.load_state(state, scalars)
    more_losses, more_results = problem.train_with(engine, micro=2, steps=STEPS[3:])
    results += more_results
    state = harness.whole_state(engine)
    engine.close()
    norms = [r.grad_norm for r in results if r.applied]
    found = (losses + more_losses, norms, [r.applied for r in results], state)
    return harness.packed(found)


def courses(world: int, kind: str, optimizer: OptimizerSettings, *, interrupted: bool = False) -> Any:
    ranks = [harness.unpacked(r) for r in run_ranks(course, world, kind, optimizer, interrupted)]
    losses = [sum(step) for step in zip(*(r[0] for r in ranks), strict=True)]
    return losses, *ranks[0][1:]


@pytest.fixture(scope="module")
def fp32() -> Any:
    return courses(1, "ddp", problem.OPTIMIZER)


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("fsdp2", 3), ("fsdp2-hybrid", 4)])
def test_training_stays_near_adamw(kind: str, world: int, fp32: Any) -> None:
    losses, norms, applied, state = courses(world, kind, EIGHT_BIT)
    assert applied == fp32[2]
    assert not applied[problem.POISONED_STEP]
    drift = max(map(problem.relative, losses, fp32[0]))
    start = problem.weights_of(problem.make_model(heads=HEADS))
    weights, plain = state.tensors["param"], fp32[3].tensors["param"]
    moved = sum((plain[name] - tensor).square().sum() for name, tensor in start.items() if name in plain)
    apart = sum((plain[name] - weights[name]).square().sum() for name in plain)
    print(
        f"{kind} on {world}: losses within {drift:.1e}, way of the weights within {(apart / moved) ** 0.5:.1e} of AdamW"
    )
    assert drift < 1e-3
    assert apart < 0.05**2 * moved
    assert all(tensor.isfinite().all() for tensors in state.tensors.values() for tensor in tensors.values())
    assert norms[0] == pytest.approx(fp32[1][0], rel=1e-5)


@pytest.mark.parametrize(("kind", "world"), [("ddp", 2), ("fsdp2", 2)])
def test_going_on_from_a_saved_state_changes_no_bit(kind: str, world: int) -> None:
    straight = courses(world, kind, EIGHT_BIT)
    resumed = courses(world, kind, EIGHT_BIT, interrupted=True)
    assert straight[:2] == resumed[:2]
    assert straight[3] == resumed[3]


def move(rank: int, world: int, kind: str, optimizer: OptimizerSettings, packed: bytes) -> bytes:
    """The state as an engine gives it back, and whether it still trains."""
    state, scalars = harness.unpacked(packed)
    engine = build(kind, optimizer)
    engine.load_state(state, scalars)
    returned = harness.whole_state(engine)
    assert engine.scalars() == scalars
    problem.train_with(engine, micro=2, steps=range(3, 4))
    engine.close()
    return harness.packed(returned)


def leave(rank: int, world: int, kind: str, optimizer: OptimizerSettings) -> bytes:
    engine = build(kind, optimizer)
    problem.train_with(engine, micro=2, steps=range(2))
    found = harness.packed((harness.whole_state(engine), engine.scalars()))
    engine.close()
    return found


def off_by(found: MemorySource, expected: MemorySource, kind: str) -> float:
    """Largest deviation of an element, in parts of the largest element of its tensor."""
    return max(
        float((found.tensors[kind][name] - tensor).abs().max() / tensor.abs().max().clamp_min(1e-30))
        for name, tensor in expected.tensors[kind].items()
    )


@pytest.mark.parametrize("origin", [("ddp", 1, problem.OPTIMIZER), ("fsdp2", 2, EIGHT_BIT)], ids=["fp32", "8bit"])
def test_states_travel_to_other_shards_and_optimizers(origin: tuple[str, int, OptimizerSettings]) -> None:
    kind, world, optimizer = origin
    departed = run_ranks(leave, world, kind, optimizer)[0]
    state = harness.unpacked(departed)[0]
    for kind, world in (("fsdp2", 3), ("ddp", 2))[: 1 if optimizer is EIGHT_BIT else 2]:
        returned = harness.unpacked(run_ranks(move, world, kind, EIGHT_BIT, departed)[0])
        assert returned.tensors["param"].keys() == state.tensors["param"].keys()
        assert all(returned.tensors["param"][name].equal(t) for name, t in state.tensors["param"].items())
        # Half the width of the widest interval between the codes: (1 - 0.986) / 2 signed, (1 - 0.993) / 2 unsigned.
        assert off_by(returned, state, "exp_avg") < 0.0071
        assert off_by(returned, state, "exp_avg_sq") < 0.0036
    plain = harness.unpacked(run_ranks(move, 2, "zero2", problem.OPTIMIZER, departed)[0])
    assert plain == state  # into fp32 moments nothing is lost


def an_optimizer(size: int) -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
    parameter = torch.nn.Parameter(torch.zeros(size))
    optimizer = make_optimizer([parameter], EIGHT_BIT, harness.CPU)
    prime_state(optimizer, [parameter])
    return optimizer, parameter


@pytest.mark.parametrize("size", [SMALLEST, SMALLEST + 1, 2**16 - 100])
def test_what_was_quantised_comes_back_exactly(size: int) -> None:
    optimizer, parameter = an_optimizer(size)
    generator = torch.Generator().manual_seed(size)
    spread = torch.logspace(-8, 3, size)  # blocks of very different sizes
    for step in range(4):
        parameter.grad = torch.randn(size, generator=generator) * spread
        parameter.grad[:BLOCK] = 0
        parameter.grad[BLOCK : 2 * BLOCK] = -parameter.grad[BLOCK : 2 * BLOCK].abs()  # the largest are negative
        optimizer.step()
        other, its_parameter = an_optimizer(size)
        for kind, moment in flat_moments(optimizer, parameter).items():
            assert isinstance(moment, QuantizedMoment)
            copy = flat_moments(other, its_parameter)[kind]
            copy.copy_(moment[:])
            assert copy[:].equal(moment[:]), (kind, step)
            assert moment[300:size].equal(moment[:][300:])
    assert parameter[2 * BLOCK :].all(), "it trained"


def test_any_values_are_kept_at_least_as_well_as_by_the_library() -> None:
    from bitsandbytes import functional

    values = torch.randn(50 * BLOCK, generator=torch.Generator().manual_seed(0)) ** 3
    optimizer, parameter = an_optimizer(SMALLEST)
    for name, source in (("qmap1", values), ("qmap2", values.square())):
        code_map = optimizer.state[parameter][name]
        codes, scales = quantize(source, code_map)
        kept = QuantizedMoment(codes, scales, code_map)[:]
        library_codes, library_state = functional.quantize_blockwise(source, code=code_map, blocksize=BLOCK)
        by_library = functional.dequantize_blockwise(library_codes, library_state)
        ours, theirs = ((found - source).view(-1, BLOCK).norm(dim=1) for found in (kept, by_library))
        assert (ours <= theirs * (1 + 1e-6)).all()


def test_moments_take_two_bytes_a_parameter() -> None:
    """2 bytes and two fp32 scales for 256 elements, beside the maps, which all parameters share."""
    size = 2**16
    optimizer, parameter = an_optimizer(size)
    state = optimizer.state[parameter]
    held = sum(t.nbytes for name, t in state.items() if isinstance(t, torch.Tensor) and not name.startswith("qmap"))
    assert held == 2 * size + 2 * 4 * size // BLOCK
    small, its_parameter = an_optimizer(SMALLEST - 1)
    assert all(small.state[its_parameter][f"state{i}"].dtype is torch.float32 for i, _ in enumerate(MOMENTS, 1))


def test_zero_is_refused() -> None:
    engine = {"backend": "deepspeed", "deepspeed": {"zero_optimization": {"stage": 2}}}
    settings = Settings.model_validate({"run": {"max_steps": 1}, "engine": engine, "optimizer": {"kind": "adamw_8bit"}})
    with pytest.raises(SettingsError, match=r"adamw_8bit.*flat.*fsdp2"):
        complete_config(settings, settings.optimizer, 2)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SettingsError, match=r"pip install .*bitsandbytes"):
        check_optimizer(EIGHT_BIT)
    check_optimizer(problem.OPTIMIZER)
