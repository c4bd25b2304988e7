"""Which parameters train."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

import torch

from qwen_edit_zero.errors import SettingsError


@dataclass(frozen=True)
class TrainableReport:
    """What trains, in elements and tensors; `str()` is a line for the user."""

    trained: int
    trained_tensors: int
    frozen: int
    frozen_tensors: int

    def __str__(self) -> str:
        total = self.trained + self.frozen
        share = f"{self.trained / total:.2%}, {self.trained_tensors} tensors"
        line = f"{self.trained:,} of {total:,} parameters train ({share})"
        return line if not self.frozen else f"{line}; {self.frozen_tensors} tensors are frozen"


def freeze(module: torch.nn.Module, patterns: Sequence[str]) -> TrainableReport:
    """Freeze every parameter whose name matches one of the shell patterns (`transformer_blocks.[0-9].*`, `*_mod.*`).

    Works on any module, partitioned or on the meta device. Raises SettingsError for a pattern that matches nothing,
    and if nothing would train.
    """
    parameters = dict(module.named_parameters())
    for pattern in patterns:
        matched = [name for name in parameters if fnmatchcase(name, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern.rstrip(".*"), sorted(set(_names(parameters))), n=3, cutoff=0.5)
            raise SettingsError(
                f"model.freeze: no parameter matches {pattern!r}; "
                + (
                    f"the nearest names are {', '.join(near)}"
                    if near
                    else f"a name looks like {next(iter(parameters))}"
                )
                + ". Patterns are matched against whole names, so a module's parameters are `MODULE.*`"
            )
        for name in matched:
            parameters[name].requires_grad_(False)
    trained = [_numel(p) for p in parameters.values() if p.requires_grad]
    frozen = [_numel(p) for p in parameters.values() if not p.requires_grad]
    if not trained:
        raise SettingsError(f"model.freeze: {', '.join(patterns)} freezes every parameter, so nothing would train")
    return TrainableReport(sum(trained), len(trained), sum(frozen), len(frozen))


def full_shape(parameter: torch.Tensor) -> tuple[int, ...]:
    """Shape of the whole parameter, also while ZeRO-3 has it partitioned (it then looks like shape (0,))."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _numel(parameter: torch.Tensor) -> int:
    return torch.Size(full_shape(parameter)).numel()


def _names(parameters: dict[str, torch.nn.Parameter]) -> Iterator[str]:
    for name in parameters:
        parts = name.split(".")
        yield from (".".join(parts[: i + 1]) for i in range(len(parts)))
