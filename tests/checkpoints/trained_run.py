"""A checkpoint of the tiny model, with two frozen parameters, to be consolidated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from qwen_edit_zero.checkpoints.manifest import ModelReference
from qwen_edit_zero.edit_model.folder import ModelFolder
from tests.checkpoints.states import State, owned_ranges, save

FROZEN = ("proj_out.weight", "transformer_blocks.0.attn.norm_q.weight")
Weights = dict[str, torch.Tensor]


def reference(base: ModelFolder, **changes: Any) -> ModelReference:
    """What a checkpoint of a run from `base` says of it."""
    known = {"path": "tiny", "fingerprint": base.fingerprint, "config": base.transformer_config, "frozen": FROZEN}
    return ModelReference(**(known | changes))


def save_weights(folder: Path, weights: Weights, model: ModelReference, step: int = 3) -> Path:
    """A checkpoint of these weights, and of moments of some."""
    state: State = {(name, "param"): w for name, w in weights.items()}
    state |= {(name, "exp_avg"): torch.zeros(w.shape) for name, w in list(weights.items())[:3]}
    return save(folder, step, ranges=lambda: owned_ranges(state, 0, 1, step), model=model)
