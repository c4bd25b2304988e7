"""State in host memory changes memory and speed, not results."""

from __future__ import annotations

import ctypes.util
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen_edit_zero.engines.factory import make_engine
from qwen_edit_zero.engines.zero.config import check_frozen
from qwen_edit_zero.errors import SettingsError
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


def with_and_without_nvme(rank: int, world: int, kind: str, precision: str, folder: str) -> bytes:
    """Losses, norms and state of a training interrupted by a saved state; and how many parameters are on NVMe."""
    found = []
    nvme = {"device": "nvme", "nvme_path": folder, "buffer_count": 14, "buffer_size": 2_000_000, "max_in_cpu": 0}
    for options in ({}, {"offload_param": nvme}):
        engines = []
        for _ in range(2):
            engine = make_engine(harness.engine_settings(kind, precision=precision, zero=options), device=harness.CPU)
            engine.setup(problem.make_model(heads=64), optimizer=OPTIMIZER, weights=None)  # below 1 MiB nothing moves
            if engines:
                engine.load_state(*engines.pop())
            losses, results = problem.train_with(engine, micro=2, steps=range(1, 3), poisoned_rank=0)
            engines.append((harness.whole_state(engine), engine.scalars()))
            places = [parameter.ds_tensor.final_location for parameter in engine.module.parameters()]
            whole = dict(engine.full_weights())
            engine.close()
        on_nvme = sum(place == "nvme" for place in places)
        found.append((on_nvme, losses, [r.applied for r in results], engines[0][0].tensors, whole))
    return harness.packed(found)


# Compiles DeepSpeed's asynchronous reader and its Adam for CPUs: some minutes the first time.
@pytest.mark.slow
@pytest.mark.skipif(ctypes.util.find_library("aio") is None, reason="libaio is not installed (apt install libaio-dev)")
@pytest.mark.parametrize(("kind", "precision"), [("zero3", "fp32"), ("zero3-offload", "bf16")])
def test_parameters_on_nvme_leave_results_alone(kind: str, precision: str, tmp_path: Path) -> None:
    ranks = run_ranks(with_and_without_nvme, 2, kind, precision, str(tmp_path), timeout=500)
    for memory, nvme in map(harness.unpacked, ranks):
        assert memory[0] == 0
        assert nvme[0] > 10
        assert memory[1:3] == nvme[1:3]
        assert nvme[2] == [True, False]
        assert harness.MemorySource(memory[3]) == harness.MemorySource(nvme[3])
        assert all(memory[4][name].equal(tensor) for name, tensor in nvme[4].items())


def test_frozen_parameters_on_nvme_are_refused(tmp_path: Path) -> None:
    config = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}}
    check_frozen(config, [])
    with pytest.raises(SettingsError, match=r"'img_in.weight' is frozen \(2 such\)"):
        check_frozen(config, ["img_in.weight", "img_in.bias"])
