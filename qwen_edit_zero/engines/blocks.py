"""The repeated blocks of a model, and their regional compilation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from qwen_edit_zero.engines.activation_checkpointing import checkpointed
from qwen_edit_zero.settings.models import ModelSettings


def repeated_blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The blocks the model consists of, in order: instances of the classes named in its `_repeated_blocks`."""
    names = set(getattr(module, "_repeated_blocks", None) or ())
    return [block for block in module.modules() if type(block).__name__ in names]


def prepare_blocks(
    module: torch.nn.Module, settings: ModelSettings, device: torch.device, *, early_stop: bool = True
) -> None:
    """Compile each block and checkpoint its activations as `settings` say. Parameter names stay as they are.

    A block's `forward` is wrapped, not the block: hooks of the engines (which gather and release the block's
    parameters) run outside of the recomputation, and no parameter gets a new name. `early_stop=False` recomputes
    to the block's end, so that hooks of the submodules always run in pairs. All blocks share one piece of compiled
    code (regional compilation).
    """
    for number, block in enumerate(repeated_blocks(module)):
        forward: Callable[..., Any] = block.forward
        selective = settings.activation_checkpointing == "selective"
        if settings.compile and not selective:
            forward = torch.compile(forward)
        if settings.activation_checkpointing != "none" and number % settings.checkpoint_every == 0:
            forward = checkpointed(
                forward,
                keep_attention=selective,
                offload_to_host=settings.offload_activations,
                device=device,
                early_stop=early_stop,
            )
        if settings.compile and selective:
            forward = torch.compile(forward)  # the compiler must see what is to be kept
        block.forward = forward
