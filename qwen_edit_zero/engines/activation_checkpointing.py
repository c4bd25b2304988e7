"""Activation checkpointing: a block keeps its inputs for the backward pass and computes its activations again there.

Chen et al., "Training Deep Nets with Sublinear Memory Cost", arXiv:1604.06174. Results are the same to the bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

# Parts of the names of the operators that compute attention in one kernel, of torch and of the flash-attn packages.
_ATTENTION = ("attention", "flash_attn")


def checkpointed(
    forward: Callable[..., Any],
    *,
    keep_attention: bool,
    offload_to_host: bool,
    device: torch.device,
    early_stop: bool,
) -> Callable[..., Any]:
    """`forward`, recomputed in the backward pass.

    Args:
        keep_attention: do not recompute what attention kernels return (half of a block's time at long sequences, for
            one more tensor of the size of the block's input). Attention that is not one kernel is recomputed.
        offload_to_host: keep the block's inputs in (pinned) host memory; copied back when backward needs them.
        device: where the block computes.
        early_stop: see `torch.utils.checkpoint.checkpoint`.
    """
    pinned = device.type == "cuda"
    contexts = functools.partial(create_selective_checkpoint_contexts, _policy) if keep_attention else noop_context_fn

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        names = list(kwargs)

        def positional(*values: Any) -> Any:
            split = len(values) - len(names)
            return forward(*values[:split], **dict(zip(names, values[split:], strict=True)))

        # Only positional tensors are saved the way that lets them be offloaded.
        with torch.autograd.graph.save_on_cpu(pin_memory=pinned) if offload_to_host else nullcontext():
            return checkpoint(
                positional,
                *args,
                *kwargs.values(),
                use_reentrant=False,
                early_stop=early_stop,
                context_fn=contexts,
                preserve_rng_state=False,  # nothing in the model is random
            )

    return run


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_attention = any(part in str(operator) for part in _ATTENTION)
    return CheckpointPolicy.MUST_SAVE if is_attention else CheckpointPolicy.PREFER_RECOMPUTE
