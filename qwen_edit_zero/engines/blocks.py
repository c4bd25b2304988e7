"""What is done block by block: activation checkpointing and regional compilation. Parameter names stay as they are."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint


def repeated_blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks the model consists of, in order: instances of the classes named in its `_repeated_blocks`."""
    names = set(getattr(module, "_repeated_blocks", None) or ())
    return [block for block in module.modules() if type(block).__name__ in names]


def compile_blocks(module: torch.nn.Module) -> None:
    """Compile the forward of each block. All blocks share one piece of compiled code (regional compilation)."""
    for block in repeated_blocks(module):
        _set_forward(block, torch.compile(block.forward))


def checkpoint_blocks(module: torch.nn.Module, *, early_stop: bool = True) -> None:
    """Keep only each block's inputs for the backward pass and compute its activations again there.

    The block's `forward` is wrapped, not the block: hooks of the engines (which gather and release the block's
    parameters) run outside of the recomputation, and no parameter gets a new name. `early_stop=False` recomputes
    to the block's end, so that hooks of the submodules always run in pairs.
    """
    for block in repeated_blocks(module):
        _set_forward(block, _checkpointed(block.forward, early_stop))


def _set_forward(block: torch.nn.Module, forward: Callable[..., Any]) -> None:
    block.forward = forward


def _checkpointed(forward: Callable[..., Any], early_stop: bool) -> Callable[..., Any]:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, early_stop=early_stop, **kwargs)

    return run
