"""The running average of the weights: its formula, and what happens when it begins or ends between runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from qwen_edit_zero.engines.ema import WeightAverage
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.settings.models import OptimizerSettings
from tests.engines import harness, problem
from tests.engines.harness import MemorySource
from tests.ranks import run_ranks

WITH = problem.OPTIMIZER.model_copy(update={"ema": 0.9})


@pytest.mark.parametrize(
    ("warmup", "decays"), [(False, [0.25] * 4), (True, [1 / 10, 2 / 11, 3 / 12, 0.25])]
)  # (1 + n) / (10 + n) passes 0.25 after three updates
def test_average_is_the_formulas(warmup: bool, decays: list[float]) -> None:
    weight = torch.tensor([1.0, -2.0])
    average = WeightAverage(OptimizerSettings(ema=0.25, ema_warmup=warmup), {"w": weight})
    expected = weight.double()
    assert average["w"].equal(weight)
    for step, decay in enumerate(decays):
        assert average.decay() == pytest.approx(decay)
        weight.mul_(1.5).add_(step)
        average.update({"w": weight})
        expected = decay * expected + (1 - decay) * weight.double()
    torch.testing.assert_close(average["w"].double(), expected, rtol=1e-6, atol=1e-6)
    assert average.scalars() == {"ema_updates": 4}


def begin_and_end(rank: int, world: int, kind: str) -> bytes:
    """Go on with an average from a state without, and without one from a state with."""
    start = MemorySource.of_weights({n: w + 1 for n, w in problem.weights_of(problem.make_model()).items()})
    plain = harness.build(kind, None)
    problem.train_with(plain, micro=2, steps=range(1))
    state, scalars = harness.whole_state(plain), plain.scalars()
    averaging = harness.build(kind, start, optimizer=WITH)
    problem.train_with(averaging, micro=2, steps=range(2))
    report: dict[str, Any] = {"begins": averaging.load_state(state, scalars), "scalars": averaging.scalars()}
    found = harness.whole_state(averaging)
    report["starts from the weights"] = all(found.tensors["ema"][n].equal(w) for n, w in state.tensors["param"].items())
    report["ends"] = plain.load_state(found, averaging.scalars())
    report["has none"] = "ema" not in harness.whole_state(plain).tensors and plain.scalars() == scalars
    averaging.load_state(found, {"optimizer_steps": 5})
    report["updates"] = averaging.scalars()["ema_updates"]
    del found.tensors["ema"]["unused"]
    with pytest.raises(CheckpointError, match="no ema of 'unused'"):
        averaging.load_state(found, scalars)
    plain.close()
    averaging.close()
    return harness.packed(report)


@pytest.mark.parametrize("kind", ["ddp", "fsdp2", "zero2", "zero3"])
def test_an_average_that_begins_or_ends_is_told(kind: str) -> None:
    for report in map(harness.unpacked, run_ranks(begin_and_end, 2, kind)):
        (begins,), (ends,) = report["begins"], report["ends"]
        assert "the checkpoint has no averaged weights: the average starts from its weights" in begins
        assert "the average is not continued" in ends
        assert report["scalars"] == {"optimizer_steps": 1, "ema_updates": 0}
        assert report["starts from the weights"]
        assert report["has none"]
        assert report["updates"] == 5
