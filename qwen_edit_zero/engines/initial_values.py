"""Where the parameters of a model get their first values from."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from qwen_edit_zero.errors import ModelFolderError
from qwen_edit_zero.flat_state import PARAM, TensorSource


class InitialValues:
    """A TensorSource for every parameter of `module`: those in `weights`, and those the module was built with.

    `read` raises ModelFolderError for values that are not finite.

    Parameters on the meta device must be in `weights`. Real ones that are not (new adapters, a model built without
    a folder) keep their values. Tied parameters appear under the first of their names.

    Raises:
        ModelFolderError: a tensor is missing from `weights` or has another shape than the parameter.
    """

    def __init__(self, module: torch.nn.Module, weights: TensorSource | None) -> None:
        self._weights = weights
        self._own: dict[str, torch.Tensor] = {}
        self._shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        stored = set(weights.names()) if weights is not None else set()
        missing = []
        for name, shape in self._shapes.items():
            if 0 in shape:
                raise ModelFolderError(
                    f"Parameter '{name}' of the model has shape {shape}, so no elements: nothing of it could be "
                    f"trained or saved. Is the config of the model complete?"
                )
        for name, parameter in module.named_parameters():
            if weights is not None and name in stored:
                shape = tuple(weights.shape(name))
                if shape != tuple(parameter.shape):
                    raise ModelFolderError(
                        f"Tensor '{name}' has shape {shape} in the model folder, but the model built from its "
                        f"config needs {tuple(parameter.shape)}: weights and config do not belong together."
                    )
            elif parameter.is_meta:
                missing.append(name)
            else:
                self._own[name] = parameter.detach().flatten().to("cpu", copy=True)
        if missing:
            raise ModelFolderError(
                f"The model folder has no tensor '{missing[0]}' ({len(missing)} of {len(self._shapes)} are missing), "
                f"which the model built from its config needs. Is the folder complete and of this model?"
            )

    def names(self, kind: str = PARAM) -> Iterable[str]:
        """Names of all parameters."""
        return self._shapes if kind == PARAM else ()

    def shape(self, name: str, kind: str = PARAM) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self._shapes[name]

    def read(self, name: str, start: int, length: int, kind: str = PARAM) -> torch.Tensor:
        """Elements `start .. start + length` of the flattened parameter, in the stored dtype."""
        if name in self._own:
            return self._own[name][start : start + length]
        assert self._weights is not None
        values = self._weights.read(name, start, length)
        if values.is_floating_point() and not values.isfinite().all():
            raise ModelFolderError(
                f"Tensor '{name}' holds values that are not finite in the model folder: every step from it would be "
                f"skipped. The folder is damaged, or comes from a training run that diverged."
            )
        return values
