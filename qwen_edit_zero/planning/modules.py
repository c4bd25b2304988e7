"""In which order a forward and backward pass uses the layers that have parameters, each with its parameters."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from qwen_edit_zero.planning.model import Parameter, TransformerShape
from qwen_edit_zero.planning.trainable import split, without_gradient
from qwen_edit_zero.settings.models import ModelSettings

_BEFORE = ("img_in", "txt_norm", "txt_in", "time_text_embed.timestep_embedder.linear_1",
           "time_text_embed.timestep_embedder.linear_2", "time_text_embed.addition_t_embedding")  # fmt: skip
_IN_BLOCK = (
    "img_mod.1", "txt_mod.1", "attn.to_q", "attn.to_k", "attn.to_v", "attn.add_q_proj", "attn.add_k_proj",
    "attn.add_v_proj", "attn.norm_q", "attn.norm_k", "attn.norm_added_q", "attn.norm_added_k", "attn.to_out.0",
    "attn.to_add_out", "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2",
)  # fmt: skip
_AFTER = ("norm_out.linear", "proj_out")
_PARTS = (".base_layer", ".lora_A.default", ".lora_B.default", "")
# What of the input side a gradient reaches through every block.
_INPUT_SIDE = ("img_in.", "txt_norm.", "txt_in.", "time_text_embed.")


@dataclass(frozen=True)
class Use:
    """One use of a layer in a pass.

    Attributes:
        backward: whether it is in the backward pass, computed again or propagated through.
        parameters: places in the trained parameters followed by the frozen ones.
    """

    backward: bool
    parameters: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def passes(model: TransformerShape, settings: ModelSettings) -> tuple[Use, ...]:
    """All uses of layers with parameters by one micro-batch, in order."""
    trained, frozen = split(model, settings)
    everything = trained + frozen
    order = _by_layer(everything)
    blocks = [
        _of(order, (f"transformer_blocks.{number}.{name}" for name in _IN_BLOCK)) for number in range(model.blocks)
    ]
    before, after = _of(order, _BEFORE), _of(order, _AFTER)
    dead = {p.name.rpartition(".")[0] for p in without_gradient(trained, model.blocks)}

    def uses(layers: Iterable[tuple[int, ...]], *, backward: bool) -> list[Use]:
        return [Use(backward, layer) for layer in layers]

    found = uses([*before, *(layer for block in blocks for layer in block), *after], backward=False)
    found += uses(reversed(after), backward=True)
    for number in reversed(range(first_backward_block(trained, model.blocks), model.blocks)):
        block = blocks[number]
        if settings.activation_checkpointing != "none" and number % settings.checkpoint_every == 0:
            found += uses(block, backward=True)
        alive = [layer for layer in block if everything[layer[0]].name.rpartition(".")[0] not in dead]
        found += uses(reversed(alive), backward=True)
    if any(p.name.startswith(_INPUT_SIDE) for p in trained):
        found += uses(reversed(before), backward=True)
    return tuple(found)


@functools.lru_cache(maxsize=64)
def first_backward_block(trained: tuple[Parameter, ...], blocks: int) -> int:
    """Number of the first block through which a gradient goes; 0 if the input side trains."""
    if any(p.name.startswith(_INPUT_SIDE) for p in trained):
        return 0
    return min((p.block for p in trained if p.block is not None), default=blocks)


def _by_layer(parameters: Sequence[Parameter]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for place, parameter in enumerate(parameters):
        layer = parameter.name.rpartition(".")[0]
        found[layer] = (*found.get(layer, ()), place)
    return found


def _of(order: dict[str, tuple[int, ...]], names: Iterable[str]) -> list[tuple[int, ...]]:
    layers = (f"{name}{part}" for name in names for part in _PARTS)
    return [order[layer] for layer in layers if layer in order]
