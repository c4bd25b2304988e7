"""How weights get into an engine: streamed into each rank's part, checked, and never whole where they are sharded."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from qwen_edit_zero.engines.factory import make_engine
from qwen_edit_zero.engines.parameters import replace_parameters
from qwen_edit_zero.errors import ModelFolderError
from tests.engines import harness, problem
from tests.engines.census import StorageCensus
from tests.engines.harness import MemorySource
from tests.ranks import run_ranks

LAYERS = 6


def census_of_setup(rank: int, world: int, kind: str) -> dict[str, float]:
    """Peak bytes of sharding the empty model and of the whole setup, with the sizes they depend on."""
    from qwen_edit_zero.engines.fsdp2 import FSDP2Engine
    from qwen_edit_zero.engines.zero import engine as zero_engine

    place, name = (FSDP2Engine, "_wrap") if kind == "fsdp2" else (zero_engine, "partition_parameters")
    shard = getattr(place, name)
    sharding = StorageCensus()

    def shard_watched(*args: Any, **kwargs: Any) -> None:
        with sharding:
            shard(*args, **kwargs)

    setattr(place, name, shard_watched)
    start = problem.weights_of(problem.make_model(layers=LAYERS))
    engine = make_engine(harness.engine_settings(kind), device=harness.CPU)
    module = problem.make_engine_model(engine, layers=LAYERS)
    with StorageCensus(start.values()) as census:
        engine.setup(module, optimizer=problem.OPTIMIZER, weights=MemorySource.of_weights(start))
    share = sum(r.values.numel() for r in engine.local_state() if r.kind == "param")
    engine.close()
    sizes = [tensor.numel() for tensor in start.values()]
    return {
        "sharding": sharding.peak, "peak": census.peak, "share": share, "whole": sum(sizes), "largest": max(sizes)
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "bytes_an_element"), [("fsdp2", 12), ("zero3", 16)])
def test_no_rank_ever_holds_the_whole_model(kind: str, bytes_an_element: int) -> None:
    """Setup takes a rank's share of weights and moments (and of gradients, ZeRO-3), and once more of weights."""
    for count in run_ranks(census_of_setup, 3, kind):
        assert 0 < count["sharding"] < 1.1 * 4 * count["share"] + 2 * 4 * count["largest"]
        needed = bytes_an_element * count["share"]
        assert needed < count["peak"] < needed + 4 * count["share"] + 0.1 * needed
        assert count["peak"] < needed + 4 * count["whole"] / 2, "room for less than half a model beside the share"


def faulty_folders(rank: int, world: int) -> list[str]:
    messages = []
    for kind in harness.EVERY_ENGINE:
        start = problem.weights_of(problem.make_model())
        missing = {name: tensor for name, tensor in start.items() if name != "transformer.proj_out.bias"}
        diverged = start | {"transformer.proj_out.bias": torch.full_like(start["transformer.proj_out.bias"], math.nan)}
        turned = start | {"transformer.img_in.weight": start["transformer.img_in.weight"].T.contiguous()}
        for weights in (missing, turned, diverged):
            with pytest.raises(ModelFolderError) as error:
                harness.build(kind, MemorySource.of_weights(weights))
            messages.append(str(error.value))
    return messages


def test_missing_misshapen_and_non_finite_tensors_are_named() -> None:
    messages = run_ranks(faulty_folders, 1)[0]
    assert len(messages) == 3 * len(harness.EVERY_ENGINE)
    for missing, misshapen, diverged in zip(messages[::3], messages[1::3], messages[2::3], strict=True):
        assert "'transformer.proj_out.bias' holds values that are not finite" in diverged
        assert "no tensor 'transformer.proj_out.bias' (1 of" in missing
        assert "'transformer.img_in.weight' has shape (8, 16)" in misshapen
        assert "needs (16, 8)" in misshapen


def empty_parameter(rank: int, world: int) -> list[str]:
    messages = []
    for kind in harness.EVERY_ENGINE:
        engine = make_engine(harness.engine_settings(kind), device=harness.CPU)
        model = problem.make_model()
        model.gathered_too_late = torch.nn.Parameter(torch.empty(0))
        with pytest.raises(ModelFolderError) as error:
            engine.setup(model, optimizer=problem.OPTIMIZER, weights=None)
        messages.append(str(error.value))
    return messages


def test_a_parameter_without_elements_is_refused() -> None:
    for message in run_ranks(empty_parameter, 1)[0]:
        assert "'gathered_too_late' of the model has shape (0,)" in message


def other_tensors(rank: int, world: int, kind: str) -> dict[str, Any]:
    """A module with everything that is not a parameter from the folder: ties, buffers, plain tensors, new layers."""
    engine = make_engine(harness.engine_settings(kind, precision="bf16"), device=harness.CPU)
    module = problem.make_engine_model(engine)
    module.register_buffer("table", torch.arange(5.0))
    module.adapter = torch.nn.Linear(3, 3)  # real, and not in the folder
    adapter = module.adapter.weight.detach().clone()
    frequencies = module.transformer.pos_embed.pos_freqs
    start = problem.weights_of(problem.make_model())
    source = MemorySource.of_weights({name: tensor.bfloat16() for name, tensor in start.items()})
    engine.setup(module, optimizer=problem.OPTIMIZER, weights=source)
    weights = dict(engine.full_weights())
    found = {
        "ties": module.after.weight is module.before.weight,
        "buffers": module.table.dtype == torch.float32 and module.table.tolist() == [0, 1, 2, 3, 4],
        "plain tensors": module.transformer.pos_embed.pos_freqs is frequencies and frequencies.is_complex(),
        "new layers": weights["adapter.weight"].equal(adapter),
        "folder": all(weights[name].equal(tensor.bfloat16().float()) for name, tensor in start.items()),
        "names": [n for n, _ in module.named_parameters()] == [*start, "adapter.weight", "adapter.bias"],
    }
    engine.close()
    return found


@pytest.mark.parametrize("kind", harness.EVERY_ENGINE)
def test_what_is_not_from_the_folder_stays_as_it_is(kind: str) -> None:
    for found in run_ranks(other_tensors, 2, kind):
        assert all(found.values()), found


def test_replacing_parameters_keeps_ties_and_freezing() -> None:
    model = problem.make_model(frozen=True)
    before = problem.weights_of(model)
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    replace_parameters(model, lambda name, parameter: parameter.detach() + 1 if name != "gain" else None)
    assert model.after.weight is model.before.weight
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == frozen
    for name, tensor in problem.weights_of(model).items():
        assert tensor.equal(before[name] + (name != "gain"))
