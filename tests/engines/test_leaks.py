"""What the libraries do by default and must not do here: one test for each sealed leak."""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.engines import harness, problem
from tests.engines.census import CollectiveCensus
from tests.ranks import run_ranks

REDUCTIONS = ("allreduce", "reduce_scatter", "reduce")


def reductions_of_micro_steps(rank: int, world: int, kind: str, settings: dict[str, Any]) -> list[dict[str, int]]:
    """The gradient reductions in each of three micro-batches of a step, by the name of the collective."""
    engine = harness.build(kind, None, **settings)
    counts = []
    for i in range(3):
        with CollectiveCensus() as census, engine.micro_step(is_last=i == 2):
            engine.backward(problem.loss_sum(engine.forward, problem.samples(0, 1)))
        counts.append({name: census.counts[name] for name in REDUCTIONS if census.counts[name]})
    engine.step(lr=0.1)
    engine.close()
    return counts


@pytest.mark.parametrize(
    ("kind", "collective", "settings"),
    [
        ("ddp", "allreduce", {}),
        ("fsdp2", "reduce_scatter", {"reduce_every_micro_batch": False}),
        ("zero1", "reduce", {}),
    ],
)
def test_gradients_are_reduced_in_the_last_micro_batch_only(
    kind: str, collective: str, settings: dict[str, Any]
) -> None:
    first, second, last = run_ranks(reductions_of_micro_steps, 2, kind, settings)[0]
    assert first == second == {}
    assert last.keys() == {collective}


def gradient_elements(rank: int, world: int) -> tuple[int, int]:
    """Elements of gradients held between two micro-batches, and of the model."""
    engine = harness.build("fsdp2", None)
    with engine.micro_step(is_last=False):
        engine.backward(problem.loss_sum(engine.forward, problem.samples(0, 1)))
    held = sum(p.grad.to_local().numel() for p in engine.module.parameters() if isinstance(p.grad, DTensor))
    whole = sum(p.numel() for p in engine.module.parameters())
    engine.close()
    return held, whole


def test_fsdp2_holds_shards_of_gradients_while_it_accumulates() -> None:
    """Without a reduction in every micro-batch each rank would hold a whole fp32 gradient: 82 GB of this model."""
    for held, whole in run_ranks(gradient_elements, 2):
        assert 0 < held < 0.6 * whole


def test_zero_reduces_gradients_to_their_owners_instead_of_all_reducing_them() -> None:
    for counts in run_ranks(reductions_of_micro_steps, 2, "zero2", {})[0]:
        assert counts.keys() == {"reduce"}
    for counts in run_ranks(reductions_of_micro_steps, 2, "zero3", {})[0]:
        assert counts.keys() == {"reduce_scatter"}


def gathered_after_eval(rank: int, world: int) -> list[str]:
    engine = harness.build("fsdp2", None, reshard_after_forward=False)
    with engine.eval_mode():
        problem.loss_sum(engine.forward, problem.samples(0, 1))
    return [n for n, p in engine.module.named_parameters() if p.ndim and not isinstance(p, DTensor)]


def test_fsdp2_is_sharded_again_after_evaluation() -> None:
    assert run_ranks(gathered_after_eval, 2) == [[], []]


def timeouts(rank: int, world: int) -> list[timedelta]:
    from deepspeed.utils import groups

    hybrid = harness.build("fsdp2", None, shard_size=1, timeout_seconds=77)
    zero = harness.build("zero3", None, timeout_seconds=78)
    own = [hybrid._mesh.get_group(0), hybrid._mesh.get_group(1), groups._clone_world_group()]  # type: ignore[attr-defined]
    zero.close()
    return [group._get_backend(torch.device("cpu")).options._timeout for group in own]


def test_groups_of_the_libraries_have_the_timeout_of_the_run() -> None:
    seconds = [timedelta(seconds=s) for s in (77, 77, 78)]
    assert run_ranks(timeouts, 2) == [seconds] * 2


TRAIN_QUIETLY = """
import logging, os, sys
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # as train.py does: peft imports it where it is installed
os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
import torch.distributed as dist
from qwen_edit_zero.engines import factory
assert "deepspeed" not in sys.modules, "the factory imports deepspeed before it is chosen"
from tests.engines import harness, problem
from tests.engines.census import CollectiveCensus
dist.init_process_group("gloo")
for kind in ("zero1", "zero2", "zero3"):
    engine = harness.build(kind, None)
    problem.train_with(engine, micro=4, poisoned_rank=0)
    engine.close()
for kind in ("ddp", "fsdp2"):
    problem.train_with(harness.build(kind, None), micro=4, poisoned_rank=0)
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_engines_print_nothing_and_compile_nothing(tmp_path: Path) -> None:
    """No walls of log lines, no warnings for every collective, no extension built in the middle of a start."""
    from tests.ranks import free_port

    extensions = tmp_path / "extensions"
    run = subprocess.run(
        [sys.executable, "-c", TRAIN_QUIETLY, str(free_port())],
        capture_output=True, text=True, timeout=300, cwd=harness.REPOSITORY,
        env=os.environ | {"TORCH_EXTENSIONS_DIR": str(extensions), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stdout == ""
    assert run.stderr == ""
    assert not extensions.exists() or not list(extensions.iterdir())


SHORTCUTS = ((False, False), (True, False), (False, True))  # micro-batches of three steps that leave out most layers


def norms_with_shortcuts(rank: int, world: int, kind: str) -> list[float]:
    engine = harness.build(kind, None)
    norms = []
    for step, micro_batches in enumerate(SHORTCUTS):
        for i, shortcut in enumerate(micro_batches):
            with engine.micro_step(is_last=i == 1):
                batch = problem.samples(10 * step + i, world)[rank : rank + 1]
                engine.backward(problem.loss_sum(engine.forward, batch, shortcut=shortcut))
        norms.append(engine.step(lr=1e-12).grad_norm)
    engine.close()
    return norms


@pytest.mark.parametrize("kind", harness.EVERY_ENGINE)
def test_parameters_may_get_gradients_in_some_micro_batches_only(kind: str) -> None:
    """Left to themselves, ZeRO-3 adds the gradient of the step before to one that comes in a later micro-batch."""
    model = problem.make_model()
    expected = []
    for step, micro_batches in enumerate(SHORTCUTS):
        for i, shortcut in enumerate(micro_batches):
            problem.loss_sum(model, problem.samples(10 * step + i, 2), shortcut=shortcut).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        expected.append(torch.nn.utils.get_total_norm(gradients).item())
        model.zero_grad()
    for norms in run_ranks(norms_with_shortcuts, 2, kind):
        assert max(map(problem.relative, norms, expected)) < 1e-5
