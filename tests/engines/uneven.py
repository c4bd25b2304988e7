"""A state in which parameters have done different numbers of optimizer steps, as one begun elsewhere may have."""

from __future__ import annotations

import torch

from tests.engines import problem

BEHIND = {"gain": 1, "before.weight": 2, "transformer.proj_out.bias": 0, "transformer.txt_in.weight": 1}
DONE = 3
SCALARS = {"optimizer_steps": DONE, "parameter_steps": BEHIND}


def state() -> dict[str, dict[str, torch.Tensor]]:
    """A state as after some steps; a parameter without steps has no moments."""
    weights = problem.weights_of(problem.make_model())
    generator = torch.Generator().manual_seed(3)
    found: dict[str, dict[str, torch.Tensor]] = {"param": weights, "exp_avg": {}, "exp_avg_sq": {}}
    for name, weight in weights.items():
        done = BEHIND.get(name, DONE) > 0
        found["exp_avg"][name] = torch.randn(weight.shape, generator=generator) * 1e-2 * done
        found["exp_avg_sq"][name] = torch.rand(weight.shape, generator=generator) * 1e-3 * done
    return found
