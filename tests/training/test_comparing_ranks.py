"""Ranks are compared: for speed, and for what must be the same on all of them."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen_edit_zero.training.replay import digests, odd_ranks, total
from qwen_edit_zero.training.stragglers import PERSISTENT, Persistence, slow_ranks
from tests.training.started import ends, events, log, train

USUAL = [0.1, 0.01, 2.0, 10.0]  # seconds of data, probe, waiting for others, all


def test_slow_devices_and_slow_data_are_told_apart() -> None:
    assert slow_ranks([USUAL] * 8) == {}
    found = slow_ranks([*[USUAL] * 6, [0.1, 0.02, 0.1, 10.0], [3.0, 0.01, 0.1, 10.0]])
    assert sorted(found) == [6, 7]
    assert found[6].startswith("its device takes 2.0 times as long for the same work")
    assert found[7].startswith("it waits for data 30% of the time, the others 1%")
    assert slow_ranks([[5.0, 0.01, 0.0, 10.0]] * 8) == {}, "slow data of all is no rank's fault"
    assert slow_ranks([USUAL]) == {}


def test_only_what_persists_is_told_and_only_once() -> None:
    judge = Persistence()
    told = [judge.of(found) for found in ({1: "a", 2: "b"}, {1: "a"}, {1: "a", 2: "b"}, {1: "a"}, {}, {1: "a"})]
    assert PERSISTENT == 3
    assert told == [[], [], [(1, "a")], [], [], []]


def test_a_digest_sees_every_bit_and_every_place() -> None:
    module = torch.nn.Linear(37, 5).bfloat16()
    before = int(total(digests(module)))
    with torch.no_grad():
        weight = module.weight.view(-1).view(torch.int16)
        weight[17] ^= 1
        assert int(total(digests(module))) != before
        weight[17] ^= 1
        assert int(total(digests(module))) == before
    assert int(total(torch.tensor([1, 2]))) != int(total(torch.tensor([2, 1])))
    assert odd_ranks([3, 3, 4, 3]) == [2]
    assert odd_ranks([3, 4]) == [1]
    assert odd_ranks([5] * 9) == []


def slow_data_on_rank_1() -> None:
    from qwen_edit_zero.edit_data.batches.loader import StepBatches

    if os.environ["RANK"] != "1":
        return
    go_through = StepBatches.__iter__

    def iterate(self: Any) -> Any:
        for batch in go_through(self):
            time.sleep(1.0)
            yield batch

    StepBatches.__iter__ = iterate  # type: ignore[method-assign]


def arguments(recipe: str, *more: str) -> list[str]:
    return [recipe, "checkpoint.every=null", "sampling.count=0", *more]


def test_a_rank_with_slow_data_is_named(recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = arguments(recipe, "--engine", "fsdp2", "run.max_steps=7", "run.stragglers_every=2")
    assert train(2, run, given, before=slow_data_on_rank_1) == [0, 0]
    (slow,) = [e for e in events(run) if e["event"] == "slow"]
    assert (slow["step"], slow["rank"]) == (6, 1)
    assert "it waits for data" in slow["reason"]
    assert "is persistently slower than the others" in log(run, 0)


def wrong_bit_on_rank_1() -> None:
    """A weight of rank 1 differs in the digest and in what it computes, without moving the loss by much."""
    from qwen_edit_zero.training import replay

    original = replay.ReplayHook.after_step

    def after_step(self: Any, metrics: Any, *, is_last: bool) -> None:
        if os.environ["RANK"] == "1" and metrics.step == 4:  # ZeRO publishes the masters anew at each step
            with torch.no_grad():
                parameter = next(p for n, p in self._engine.module.named_parameters() if n.startswith("proj_out"))
                local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
                (local if local.numel() else parameter.ds_tensor).view(-1)[0] += 1.0
        original(self, metrics, is_last=is_last)

    replay.ReplayHook.after_step = after_step  # type: ignore[method-assign]


@pytest.mark.parametrize("engine", [["--engine", "ddp"], ["--ds", "ds_configs/zero2.json"]])
def test_a_replica_that_differs_by_a_bit_is_found(engine: list[str], recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = arguments(recipe, *engine, "run.max_steps=4", "run.replay_every=2")
    assert train(2, run, given, before=wrong_bit_on_rank_1) == [0, 0]
    assert "differs" not in [e["event"] for e in events(run) if e["step"] < 4]
    found = [e for e in events(run) if e["event"] == "differs"]
    assert {e["step"] for e in found} == {4}
    assert [e["ranks"] for e in found] == [[1]] * len(found)
    assert "replicated parameters differ between ranks" in found[0]["reason"]


@pytest.mark.parametrize("engine", [["--engine", "fsdp2"], ["--ds", "ds_configs/zero3.json"]])
def test_sharded_engines_compare_a_replayed_batch_without_changing_the_run(
    engine: list[str], recipe: str, tmp_path: Path
) -> None:
    from tests.end_to_end.commands import losses

    runs = [tmp_path / "plain", tmp_path / "compared"]
    given = arguments(recipe, *engine, "run.max_steps=4")
    assert train(2, runs[0], given) == [0, 0]
    assert train(2, runs[1], [*given, "run.replay_every=1"]) == [0, 0]
    assert losses(runs[0]) == losses(runs[1])
    assert "differs" not in [e["event"] for e in events(runs[1])]


def wrong_losses_on_rank_1() -> None:
    from qwen_edit_zero.training.replay import ReplayHook

    original = ReplayHook._replayed

    def replayed(self: Any) -> torch.Tensor:
        return original(self) ^ int(os.environ["RANK"])

    ReplayHook._replayed = replayed  # type: ignore[method-assign]


def test_a_device_that_computes_otherwise_stops_the_run_if_that_is_wanted(recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = arguments(recipe, "--engine", "fsdp2", "run.replay_every=2", "run.replay_differs=stop")
    assert ends(2, run, given, before=wrong_losses_on_rank_1) == [1, 1]
    assert "the losses of one micro-batch differ between ranks" in events(run)[-1]["reason"]
