"""Options of the engines change memory and speed, not results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qwen_edit_zero.engines.shards import Shard, written_ranges
from tests.engines import harness, problem
from tests.engines.harness import MemorySource
from tests.engines.problem import ALL_STEPS, OPTIMIZER
from tests.ranks import run_ranks


def course(rank: int, world: int, kind: str, settings: dict[str, Any]) -> bytes:
    """Losses and weights of a training through the schedule, half of it after loading the state of the first half."""
    start = MemorySource.of_weights(problem.weights_of(problem.make_model()))
    engine = harness.build(kind, start, **settings)
    losses, results = problem.train_with(engine, micro=2, steps=ALL_STEPS[:3], poisoned_rank=0)
    state, scalars = harness.whole_state(engine), engine.scalars()
    engine.close()
    engine = harness.build(kind, start, **settings)
    engine.load_state(state, scalars)
    more_losses, more_results = problem.train_with(engine, micro=2, steps=ALL_STEPS[3:])
    weights = dict(engine.full_weights())
    applied = [r.applied for r in results + more_results]
    engine.close()
    return harness.packed((losses + more_losses, weights, applied))


def courses(world: int, kind: str, **settings: Any) -> tuple[list[float], dict[str, torch.Tensor], list[bool]]:
    ranks = [harness.unpacked(r) for r in run_ranks(course, world, kind, settings, timeout=500)]
    losses = [sum(step) for step in zip(*(r[0] for r in ranks), strict=True)]
    return losses, ranks[0][1], ranks[0][2]


@pytest.fixture(scope="module")
def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    model = problem.make_model()
    losses, _ = problem.train_plainly(model, OPTIMIZER)
    return losses, problem.weights_of(model)


OPTIONS = {
    # DeepSpeed's own map from parameters to masters is wrong under the first of these.
    "round robin": (3, "zero2", {"zero": {"round_robin_gradients": True}}),
    "alignment": (3, "zero1", {"zero": {"parameter_alignment": True, "overlap_comm": False}}),
    "hierarchical partitioning": (4, "zero3", {"zero": {"zero_hpz_partition_size": 2}}),
    "gathered after forward": (2, "fsdp2", {"reshard_after_forward": False}),
    "reduced once a step": (2, "fsdp2", {"reduce_every_micro_batch": False}),
    "gathered two blocks ahead": (2, "fsdp2", {"prefetch_blocks": 2}),
    "groups of one": (2, "fsdp2", {"shard_size": 1}),
}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_leave_results_alone(option: str, plain: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    world, kind, settings = OPTIONS[option]
    losses, weights, _ = courses(world, kind, **settings)
    assert max(map(problem.relative, losses, plain[0])) < 1e-5
    assert problem.largest_deviation(weights, plain[1]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero2"])
def test_compiling_leaves_results_alone(kind: str, plain: tuple[list[float], dict[str, torch.Tensor]]) -> None:
    losses, weights, _ = courses(2, kind, compiled=True)
    assert max(map(problem.relative, losses, plain[0])) < 1e-5
    assert problem.largest_deviation(weights, plain[1]) < 1e-5


CHECKPOINTING: list[dict[str, Any]] = [
    {"checkpointing": "none"},
    {"checkpointing": "block"},
    {"checkpointing": "block", "model": {"checkpoint_every": 2}},
    {"checkpointing": "selective"},
    {"checkpointing": "block", "model": {"offload_activations": True}},
]


def every_way(rank: int, world: int, kind: str) -> bytes:
    found = []
    for options in CHECKPOINTING:
        if kind == "zero3" and options["checkpointing"] == "selective":
            continue  # refused
        engine = harness.build(kind, None, **options)
        sizes: list[int] = []
        saved = torch.autograd.graph.saved_tensors_hooks(_recorder(sizes), lambda tensor: tensor)
        with saved, engine.micro_step(is_last=True):
            engine.backward(problem.loss_sum(engine.forward, problem.samples(0, 1)))
        norm = engine.step(lr=1e-12).grad_norm
        losses, results = problem.train_with(engine, micro=2, steps=range(2))
        weights = dict(engine.full_weights())
        found.append((sum(sizes), [norm, *losses], [r.grad_norm for r in results], weights))
        engine.close()
    return harness.packed(found)


def _recorder(sizes: list[int]) -> Any:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    return pack


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero1", "zero3"])
def test_checkpointing_changes_no_bit(kind: str) -> None:
    for report in map(harness.unpacked, run_ranks(every_way, 2, kind)):
        (size, *stored), *others = report
        for _, *recomputed in others:
            assert stored[:2] == recomputed[:2]
            assert all(stored[2][name].equal(recomputed[2][name]) for name in stored[2])
        block, every_second = others[0][0], others[1][0]
        assert block < every_second < size


def offloaded_inputs(rank: int, world: int) -> list[int]:
    """How many tensors of blocks are handed to the hook that keeps them in host memory, without and with the option."""
    from torch.autograd import graph

    library, counts = graph.save_on_cpu, []
    for options in ({}, {"model": {"offload_activations": True}}):
        packed: list[torch.Tensor] = []

        def recording(pin_memory: bool, packed: list[torch.Tensor] = packed) -> Any:
            hooks = library(pin_memory=pin_memory)
            pack = hooks.pack_hook

            def note(tensor: torch.Tensor) -> Any:
                packed.append(tensor)
                return pack(tensor)

            return graph.saved_tensors_hooks(note, hooks.unpack_hook)

        graph.save_on_cpu = recording
        engine = harness.build("fsdp2", None, checkpointing="block", **options)
        with engine.micro_step(is_last=True):
            engine.backward(problem.loss_sum(engine.forward, problem.samples(0, 1)))
        engine.close()
        counts.append(len(packed))
    graph.save_on_cpu = library
    return counts


def test_offloading_hands_the_inputs_of_every_block_to_the_host() -> None:
    without, offloaded = run_ranks(offloaded_inputs, 1)[0]
    assert without == 0
    assert offloaded == 2 * 3  # of two blocks: image and text tokens and the time embedding


class AttentionCount(TorchDispatchMode):
    """Counts how often attention is computed forward. Entered first, so it sees what other modes let through."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += func is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
        return func(*args, **(kwargs or {}))


def attention_calls(rank: int, world: int, kind: str) -> list[int]:
    """How often attention is computed in a forward and backward pass, by the way of checkpointing."""
    calls = []
    for checkpointing in ("none", "block", "selective"):
        engine = harness.build(kind, None, checkpointing=checkpointing)
        with AttentionCount() as count, engine.micro_step(is_last=True):
            engine.backward(problem.loss_sum(engine.forward, problem.samples(0, 1)))
        calls.append(count.calls)
        engine.close()
    return calls


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero2"])
def test_selective_checkpointing_computes_attention_once(kind: str) -> None:
    assert run_ranks(attention_calls, 2, kind) == [[2, 4, 2]] * 2  # of the two blocks


def views_of_weights(rank: int, world: int) -> int:
    """How many tensors saved for backward are views that hold a gathered weight."""
    engine = harness.build("zero3", None, checkpointing="none")
    weights = {tuple(shape[::-1]) for shape in (p.ds_shape for p in engine.module.parameters()) if len(shape) == 2}
    views: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.ndim == 2 and not tensor.is_contiguous() and tuple(tensor.shape) in weights:
            views.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), engine.micro_step(is_last=True):
        engine.backward(problem.loss_sum(engine.forward, problem.samples(0, 1)))
    engine.close()
    return len(views)


def test_zero3_frees_gathered_weights_between_forward_and_backward() -> None:
    assert run_ranks(views_of_weights, 2) == [0, 0]


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 40])
def test_replicas_write_every_element_once_in_equal_amounts(replicas: int) -> None:
    shards = [
        Shard(f"p{i}", (size,), 0, torch.arange(float(size)), {"exp_avg": torch.arange(float(size)) + 100})
        for i, size in enumerate((7, 0, 1, 13, 2))
    ]
    written = [list(written_ranges(shards, replica=r, replicas=replicas)) for r in range(replicas)]
    source = MemorySource.of_ranges(r for ranges in written for r in ranges)
    for shard in shards:
        if shard.values.numel():
            assert source.tensors["param"][shard.name].equal(shard.values)
            assert source.tensors["exp_avg"][shard.name].equal(shard.moments["exp_avg"])
    amounts = [sum(r.values.numel() for r in ranges) for ranges in written]
    assert sum(amounts) == 2 * 23
    assert max(amounts) - min(amounts) <= 2
