"""ZeRO-3's partitioned parameters: making them without ever building the model."""

from __future__ import annotations

import functools
from typing import Any

import torch

from qwen_edit_zero.engines.parameters import replace_parameters


def partition_parameters(
    module: torch.nn.Module, config: dict[str, Any], *, dtype: torch.dtype, device: torch.device
) -> None:
    """Turn meta parameters into ZeRO-3 partitions without values, one at a time.

    `zero.Init` as a context would build every layer for real, initialise it, broadcast it, and change the dtype of
    other tensors made in constructors (position frequencies among them); converting single parameters is all of it
    that is needed.
    """
    from deepspeed import zero
    from deepspeed.utils import groups

    converter = zero.Init(
        config_dict_or_path=config,  # says the precision too; a `dtype` is ignored on devices without fp16
        enabled=False,
        zero_param_parallel_group=groups._get_zero_param_intra_parallel_group(),  # of an earlier engine, or none
    )

    def make(_: str, meta: torch.nn.Parameter) -> torch.nn.Parameter:
        whole = torch.empty(meta.shape, dtype=dtype, device=device)
        parameter: Any = torch.nn.Parameter(whole, requires_grad=meta.requires_grad)
        converter._convert_to_deepspeed_param(parameter)
        parameter.partition()
        assert isinstance(parameter, torch.nn.Parameter)
        return parameter

    replace_parameters(module, make)
    if converter.param_swapper is not None:
        _read_each_once(converter.param_swapper)


def _read_each_once(swapper: Any) -> None:
    """Let DeepSpeed's prefetching from NVMe ask for a parameter that is used twice soon.

    A recomputed block uses its parameters twice in a row, and the swapper refuses to read one into two buffers.
    """
    swap_in = swapper.swap_in

    def swap_in_once(parameters: list[Any], **options: Any) -> Any:
        return swap_in(list({parameter.ds_id: parameter for parameter in parameters}.values()), **options)

    swapper.swap_in = swap_in_once


def let_linears_forget_weights(module: torch.nn.Module) -> None:
    """Let linear layers save their weight for backward as the parameter, which ZeRO-3 empties between uses.

    `torch.nn.functional.linear` saves a transposed view, which keeps the gathered weight alive from forward to
    backward: without activation checkpointing the whole model. DeepSpeed replaces that function for the whole process;
    here just this module's layers get the replacement.
    """
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

    def linear(layer: torch.nn.Linear, hidden: torch.Tensor) -> Any:
        return LinearFunctionForZeroStage3.apply(hidden, layer.weight, layer.bias)

    for layer in module.modules():
        if type(layer) is torch.nn.Linear:
            layer.forward = functools.partial(linear, layer)  # type: ignore[method-assign]
