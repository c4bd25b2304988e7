"""What a run would change in the optimizer's groups is told when it goes on."""

from __future__ import annotations

from typing import Any

from qwen_edit_zero.checkpoints.describe import show_checkpoint
from qwen_edit_zero.checkpoints.optimizer_groups import OptimizerGroup, groups_of, saved_groups
from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.settings.models import OptimizerSettings
from qwen_edit_zero.training.resume import changed_groups
from tests.checkpoints.states import save

HERE = OptimizerSettings(weight_decay=0.01)
DECAYED, STILL = OptimizerGroup(0.01), OptimizerGroup(0.0, 0.5, ("block.bias", "scale"))


def changes(tmp_path: Any, groups: list[OptimizerGroup], settings: dict[str, Any]) -> tuple[list[str], str]:
    state = {"engine": {"optimizer_steps": 9, "parameter_steps": {"scale": 0, "half": 3}}}
    if groups:
        state["optimizer_groups"] = [group.json() for group in groups]  # type: ignore[assignment]
    path = save(tmp_path, 3, run_state=state, settings=settings)
    with CheckpointReader(path) as reader:
        assert saved_groups(reader.run_state) == tuple(groups)
        return changed_groups(reader, HERE), show_checkpoint(path)


def test_what_differs_is_told_by_parameter(tmp_path: Any) -> None:
    told, shown = changes(tmp_path, [DECAYED, STILL], {})
    assert told == [
        "optimizer.weight_decay of 2 parameters (block.bias, scale): 0 there, 0.01 here",
        "learning rate, times that of the schedule, of 2 parameters (block.bias, scale): 0.5 there, 1 here",
    ]
    assert "optimizer group weight decay 0, learning rate x 0.5: 2 parameters (block.bias, scale)" in shown
    assert "optimizer group weight decay 0.01, learning rate x 1: all others that train" in shown
    assert "engine.parameter_steps     2 parameters have done fewer steps (scale, half)" in shown


def test_one_decay_for_all_is_told_among_the_settings_unless_these_are_another_programs(tmp_path: Any) -> None:
    assert changes(tmp_path, [OptimizerGroup(0.1)], {})[0] == []
    (line,) = changes(tmp_path, [OptimizerGroup(0.1)], {"imported": {}})[0]
    assert line.endswith("(block.weight, block.bias, scale ...): 0.1 there, 0.01 here")
    assert changes(tmp_path, [*groups_of(HERE)], {"imported": {}})[0] == []
    assert changes(tmp_path, [], {"imported": {}})[0] == []
