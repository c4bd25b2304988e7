"""Loss spikes: which steps are spikes, and what becomes of a run that has one."""

from __future__ import annotations

import math
import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

from qwen_edit_zero.errors import DivergenceError
from qwen_edit_zero.settings.models import GuardSettings
from qwen_edit_zero.training.guard import RollBack, SpikeGuard
from tests.training.started import events, lines_of, train


def guard(**settings: Any) -> SpikeGuard:
    return SpikeGuard(GuardSettings(**({"action": "skip"} | settings)))


def judge(judging: SpikeGuard, loss: float, norm: float = 1.0) -> bool:
    judging.expect(loss)
    return judging.veto(norm)


def test_what_varies_as_usual_is_no_spike_and_what_does_not_is() -> None:
    chance, judging = random.Random(0), guard()
    assert not any(judge(judging, chance.gauss(1.0, 0.2), chance.lognormvariate(0, 0.3)) for _ in range(500))
    assert judge(judging, 4.0)
    assert judging.reason is not None
    assert judging.reason.startswith("loss 4 is ")
    assert judge(judging, 1.0, norm=50.0)
    assert "gradient norm 50 is" in str(judging.reason)
    assert not judge(judging, 0.01), "a low loss is no spike"


def test_spikes_do_not_become_usual_and_the_first_steps_are_never_spikes() -> None:
    judging = guard(most=100)
    assert not any(judge(judging, loss) for loss in [1e6, 1e3, 10] + [1] * 20)
    assert all(judge(judging, 50.0) for _ in range(30))
    assert not judge(judging, math.nan), "what is not finite is skipped anyway"
    assert not judge(judging, 1.0)


def test_a_guard_goes_on_from_its_state_as_if_it_had_not_stopped() -> None:
    chance = random.Random(1)
    first, losses = guard(), [chance.gauss(1, 0.2) for _ in range(300)]
    for loss in losses[:150]:
        judge(first, loss)
    second = guard()
    second.load(first.state())
    assert [judge(first, x) for x in losses[150:]] == [judge(second, x) for x in losses[150:]]
    assert first.state() == second.state()


def test_too_many_spikes_end_the_run_and_going_back_keeps_what_was_learnt() -> None:
    judging = guard(action="rollback", most=2, leave_out=3)
    for _ in range(30):
        judge(judging, 1.0)
    saved = judging.state()
    judge(judging, 9.0)
    assert "samples a, b" in judging.act(21, ["a", "b"]), "without a checkpoint the step is only skipped"
    judging.has_checkpoint = True
    judge(judging, 9.0)
    with pytest.raises(RollBack) as back:
        judging.act(30, ["c"])
    judging.leave_out(back.value.step)
    judging.load(saved, keep=True)
    assert judging.left_out == {28, 29, 30}
    judge(judging, 9.0)
    with pytest.raises(DivergenceError, match=r"met 3 spikes, the last at step 40: loss 9 is .*samples d"):
        judging.act(40, ["d"])


def spike_at_step_22() -> None:
    from qwen_edit_zero.cluster.pulse import position
    from qwen_edit_zero.training.task import EditTask

    losses = EditTask.losses

    def spiking(self: EditTask, forward: Any, batch: Any) -> Any:
        found = losses(self, forward, batch)
        return found * 1000 if position.step == 22 else found

    EditTask.losses = spiking  # type: ignore[method-assign]


@pytest.mark.slow
def test_skipping_and_rolling_back_end_in_the_same_run_also_if_it_stops_in_between(recipe: str, tmp_path: Path) -> None:
    arguments = [recipe, "--engine", "fsdp2", "run.max_steps=25", "checkpoint.every=5", "sampling.count=0"]

    def lines(run: Path) -> list[tuple[Any, ...]]:
        found = lines_of(run / "metrics.jsonl")
        assert [m["step"] for m in found] == list(range(1, 26))
        assert [m["step"] for m in found if m["skipped"]] == [m["step"] for m in found if m.get("guarded")] == [22]
        return [(m["samples_seen"], m["loss"], m["grad_norm"]) for m in found if m["step"] != 22]

    skipping = [*arguments, "run.guard.action=skip"]
    assert train(2, tmp_path / "skip", skipping, before=spike_at_step_22) == [0, 0]
    skipped = [e for e in events(tmp_path / "skip") if e["event"] == "skipped"]
    assert [e["step"] for e in skipped] == [22]
    assert "deviations above the usual" in skipped[0]["reason"]
    assert skipped[0]["reason"].count("samples ") == 1

    stop = (0, 20, stop_myself)
    assert train(2, tmp_path / "stopped", skipping, stop, before=spike_at_step_22) == [75, 75]
    assert train(2, tmp_path / "stopped", skipping, before=spike_at_step_22) == [0, 0]

    back = [*arguments, "run.guard.action=rollback", "checkpoint.asynchronous=false"]
    assert train(2, tmp_path / "back", back, before=spike_at_step_22) == [0, 0]
    (event,) = [e for e in events(tmp_path / "back") if e["event"] == "rolled_back"]
    assert (event["step"], event["to"], event["left_out"]) == (22, 20, [22])
    assert lines(tmp_path / "skip") == lines(tmp_path / "stopped") == lines(tmp_path / "back")


def stop_myself() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)
