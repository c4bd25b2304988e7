"""The values a module starts from: the folder's weights, and seeded adapters."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from qwen_edit_zero.edit_model.folder import ModelFolder
from qwen_edit_zero.edit_model.freezing import full_shape
from qwen_edit_zero.edit_model.lora import base_name, initial_adapter, is_adapter
from qwen_edit_zero.edit_model.weights import TransformerWeights
from qwen_edit_zero.errors import ModelFolderError
from qwen_edit_zero.flat_state import PARAM


class InitialWeights:
    """TensorSource over all parameters of a module built from a folder, by the module's own names."""

    def __init__(self, stored: TransformerWeights, shapes: dict[str, tuple[int, ...]], seed: int) -> None:
        self._stored, self._shapes, self._seed = stored, shapes, seed

    def names(self, kind: str = PARAM) -> Iterable[str]:
        """Names of the module's parameters."""
        return self._shapes.keys() if kind == PARAM else ()

    def shape(self, name: str, kind: str = PARAM) -> tuple[int, ...]:
        """Shape of the whole tensor. Raises KeyError if it is not there."""
        if kind != PARAM:
            raise KeyError(kind)
        return self._shapes[name]

    def read(self, name: str, start: int, length: int, kind: str = PARAM) -> torch.Tensor:
        """Elements `start .. start + length`: from the shards, or of a seeded adapter."""
        shape = self.shape(name, kind)
        if is_adapter(name):
            return initial_adapter(name, shape, self._seed).flatten()[start : start + length]
        return self._stored.read(base_name(name), start, length)

    def close(self) -> None:
        """Close the shards."""
        self._stored.close()


def initial_source(folder: ModelFolder, module: torch.nn.Module, *, seed: int) -> InitialWeights:
    """Start values for `module`, a transformer built from `folder` by `build_transformer` (with or without LoRA).

    Raises ModelFolderError listing every tensor that the shards lack, have in another shape, or have too many.
    """
    stored = TransformerWeights(folder)
    shapes = {name: full_shape(parameter) for name, parameter in module.named_parameters()}
    expected = {base_name(name): shape for name, shape in shapes.items() if not is_adapter(name)}
    there = {name: stored.shape(name) for name in stored.names()}
    problems = [f"{name} is missing" for name in expected.keys() - there.keys()]
    problems += [f"{name} does not belong to this configuration" for name in there.keys() - expected.keys()]
    problems += [
        f"{name} has shape {list(there[name])}, not {list(shape)}"
        for name, shape in expected.items()
        if name in there and there[name] != shape
    ]
    if problems:
        shown = "; ".join(sorted(problems)[:6]) + (f"; and {len(problems) - 6} more" if len(problems) > 6 else "")
        raise ModelFolderError(
            f"{folder.path / 'transformer'}: weights and config.json do not fit each other: {shown}. Download both "
            "again, from the same model"
        )
    return InitialWeights(stored, shapes, seed)
