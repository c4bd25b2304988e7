"""Replacing the parameters of a module in place, tied ones together."""

from __future__ import annotations

from collections.abc import Callable

import torch


def trained(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that get gradients, by name; tied ones once, under the first of their names."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def frozen(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The other parameters, by name."""
    return {name: parameter for name, parameter in module.named_parameters() if not parameter.requires_grad}


def replace_parameters(module: torch.nn.Module, make: Callable[[str, torch.nn.Parameter], torch.Tensor | None]) -> None:
    """Put `make(name, parameter)`, a tensor or a parameter, in the place of every parameter; None leaves it alone.

    `requires_grad` and ties are kept.
    """
    slots: dict[int, list[tuple[torch.nn.Module, str]]] = {}
    for submodule in module.modules():
        for attribute, parameter in submodule._parameters.items():
            if parameter is not None:
                slots.setdefault(id(parameter), []).append((submodule, attribute))
    for name in [name for name, _ in module.named_parameters()]:
        old = module.get_parameter(name)
        tensor = make(name, old)
        if tensor is None:
            continue
        new = tensor if isinstance(tensor, torch.nn.Parameter) else torch.nn.Parameter(tensor, old.requires_grad)
        for submodule, attribute in slots[id(old)]:
            setattr(submodule, attribute, new)


def to_meta(module: torch.nn.Module, *, frozen_dtype: torch.dtype) -> None:
    """Drop all parameter values. Trained parameters become fp32, frozen ones, never updated, `frozen_dtype`."""

    def make(_: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        dtype = torch.float32 if parameter.requires_grad else frozen_dtype
        return torch.empty(parameter.shape, dtype=dtype, device="meta")

    replace_parameters(module, make)


def move_buffers(module: torch.nn.Module, device: torch.device) -> None:
    """Move registered buffers. Other tensors a module keeps as attributes are its own business and stay."""
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None:
                assert not buffer.is_meta, f"buffer {name} has no values"
                submodule._buffers[name] = buffer.to(device)
