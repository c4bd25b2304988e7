"""AdamW on flat masters whose parameters have not all done as many steps.

A flat master has one step count in the optimizer. Where counts differ, the optimizer is given the master in parts, one
for each run of neighbouring elements with the same count: parameters that alias the master, with a count of their own
and moments that alias the master's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from qwen_edit_zero.engines.adamw import set_step
from qwen_edit_zero.engines.shards import MOMENTS
from qwen_edit_zero.engines.step_counts import StepCounts
from qwen_edit_zero.engines.zero.masters import Place

Parts = dict[torch.Tensor, list[tuple[slice, torch.nn.Parameter]]]  # by master; a tensor is hashed by identity


def step_in_parts(optimizer: torch.optim.Optimizer, steps: StepCounts, places: Mapping[str, Place]) -> None:
    """Give every parameter its step count, whatever was set before.

    `optimizer` holds flat masters, which have their state; `places` are all of its parameters. Padding between
    parameters, which is zero and gets no gradient, may count with a neighbour or not at all.
    """
    for master in [*optimizer.state]:
        if getattr(master, "is_part_of_a_master", False):
            del optimizer.state[master]
    if isinstance(optimizer.__dict__.get("step"), _Stepping):  # of an earlier call
        del optimizer.step
    for master in optimizer.state:
        set_step(optimizer, master, steps.common)
    if steps.differ and (parts := _make_parts(optimizer, steps, places)):
        optimizer.step = _Stepping(optimizer, optimizer.step, parts)  # type: ignore[method-assign, assignment]


def _make_parts(optimizer: torch.optim.Optimizer, steps: StepCounts, places: Mapping[str, Place]) -> Parts:
    runs: dict[torch.Tensor, list[tuple[int, int, int]]] = {}  # begin, end, count
    for name, place in sorted(places.items(), key=lambda item: item[1].offset):
        begin, end, count = place.offset, place.offset + place.length, steps.of(name)
        known = runs.setdefault(place.flat, [])
        if known and known[-1][2] == count:
            begin = known.pop()[0]
        known.append((begin, end, count))
    parts: Parts = {}
    for master, known in runs.items():
        if {count for _, _, count in known} == {steps.common}:
            continue
        for begin, end, count in known:
            stretch = slice(begin, end)
            part: Any = torch.nn.Parameter(master.detach()[stretch])
            part.is_part_of_a_master = True
            state = optimizer.state[master]
            counter = state["step"].clone() if isinstance(state["step"], torch.Tensor) else 0
            optimizer.state[part] = {"step": counter} | {kind: state[kind][stretch] for kind in MOMENTS}
            set_step(optimizer, part, count)
            parts.setdefault(master, []).append((stretch, part))
    return parts


class _Stepping:
    """Takes the place of an optimizer's `step`: the parts stand in for their masters while it runs."""

    def __init__(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any], parts: Parts) -> None:
        self._optimizer, self._step, self._parts = optimizer, step, parts

    def __call__(self) -> Any:
        groups = self._optimizer.param_groups
        whole = [group["params"] for group in groups]
        try:
            for group in groups:
                group["params"] = [part for master in group["params"] for part in self._of(master)]
            return self._step()
        finally:
            for group, params in zip(groups, whole, strict=True):
                for master in params:
                    for _, part in self._parts.get(master, ()):
                        part.grad = None
                group["params"] = params

    def _of(self, master: torch.Tensor) -> list[torch.Tensor]:
        if master not in self._parts:
            return [master]
        for stretch, part in self._parts[master]:
            part.grad = None if master.grad is None else master.grad[stretch]
        return [part for _, part in self._parts[master]]
