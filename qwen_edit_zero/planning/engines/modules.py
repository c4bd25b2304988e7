"""In which order a forward and backward pass uses the modules of the transformer, each with its own parameters."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from qwen_edit_zero.planning.jobs.model import Parameter, TransformerShape
from qwen_edit_zero.planning.jobs.trainable import split
from qwen_edit_zero.settings.models import ModelSettings

# Modules in the order of their calls; in backward in the order in which gradients reach their outputs.
_CONDITIONS = "time_text_embed.addition_t_embedding"  # of layered models only
_BEFORE = (
    "", "img_in", "txt_norm", "txt_in", "time_text_embed", "time_text_embed.time_proj",
    "time_text_embed.timestep_embedder", "time_text_embed.timestep_embedder.linear_1",
    "time_text_embed.timestep_embedder.act", "time_text_embed.timestep_embedder.linear_2",
    _CONDITIONS, "pos_embed",
)  # fmt: skip
_BEFORE_BACKWARD = (
    "time_text_embed", _CONDITIONS, "time_text_embed.timestep_embedder",
    "time_text_embed.timestep_embedder.linear_2", "time_text_embed.timestep_embedder.act",
    "time_text_embed.timestep_embedder.linear_1", "txt_in", "txt_norm", "img_in",
)  # fmt: skip
_IN_BLOCK = (
    "img_mod", "img_mod.0", "img_mod.1", "txt_mod", "txt_mod.0", "txt_mod.1", "img_norm1", "txt_norm1", "attn",
    "attn.to_q", "attn.to_k", "attn.to_v", "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj",
    "attn.norm_q", "attn.norm_k", "attn.norm_added_q", "attn.norm_added_k",
    "attn.to_out.0", "attn.to_out.1", "attn.to_add_out",
    "img_norm2", "img_mlp", "img_mlp.net.0", "img_mlp.net.0.proj", "img_mlp.net.1", "img_mlp.net.2",
    "txt_norm2", "txt_mlp", "txt_mlp.net.0", "txt_mlp.net.0.proj", "txt_mlp.net.1", "txt_mlp.net.2",
)  # fmt: skip
_ATTENTION_TEXT = "attn (text)"  # attention's second output
_TEXT_BACKWARD = ("txt_mlp", "txt_mlp.net.2", "txt_mlp.net.1", "txt_mlp.net.0", "txt_mlp.net.0.proj", "txt_norm2")
_IN_BLOCK_BACKWARD = (
    "img_mlp", "img_mlp.net.2", "img_mlp.net.1", "img_mlp.net.0", "img_mlp.net.0.proj", "img_norm2",
    "attn", _ATTENTION_TEXT, "attn.to_add_out", "attn.to_out.1", "attn.to_out.0",
    "attn.norm_added_k", "attn.norm_added_q", "attn.norm_k", "attn.norm_q",
    "attn.add_v_proj", "attn.add_k_proj", "attn.add_q_proj", "attn.to_v", "attn.to_k", "attn.to_q",
    "txt_norm1", "img_norm1", "txt_mod", "txt_mod.1", "txt_mod.0", "img_mod", "img_mod.1", "img_mod.0",
)  # fmt: skip
_AFTER = ("norm_out", "norm_out.silu", "norm_out.linear", "norm_out.norm", "proj_out")
_AFTER_BACKWARD = ("", "proj_out", "norm_out", "norm_out.norm", "norm_out.linear", "norm_out.silu")
_ADAPTED = (".base_layer", ".lora_dropout.default", ".lora_A.default", ".lora_B.default")
# What of the input side a gradient reaches through every block.
_INPUT_SIDE = ("img_in.", "txt_norm.", "txt_in.", "time_text_embed.")
_MODULATION = ("img_mod", "txt_mod")
# What attention gets from a block's inputs: projections, and norms of them.
_PROJECTIONS = {
    "attn.to_q": "attn.norm_q", "attn.to_k": "attn.norm_k", "attn.to_v": "", "attn.add_q_proj": "attn.norm_added_q",
    "attn.add_k_proj": "attn.norm_added_k", "attn.add_v_proj": "",
}  # fmt: skip


@dataclass(frozen=True)
class Use:
    """One use of a module in a pass.

    Attributes:
        backward: whether it is in the backward pass, computed again or propagated through.
        parameters: places in the trained parameters followed by the frozen ones; its own, not those of modules in it.
    """

    backward: bool
    parameters: tuple[int, ...]


@functools.lru_cache(maxsize=64)
def passes(model: TransformerShape, settings: ModelSettings) -> tuple[Use, ...]:
    """All uses of modules by one micro-batch, in order, also of those without parameters."""
    trained, frozen = split(model, settings)
    own = _by_module(trained + frozen)
    to_inputs = any(p.name.startswith(_INPUT_SIDE) for p in trained)
    with_training = {p.name.partition(".lora_")[0].removesuffix(".weight").removesuffix(".bias") for p in trained}
    found: list[Use] = []

    def use(modules: Iterable[str], *, prefix: str = "", backward: bool, without_base: Collection[str] = ()) -> None:
        for module in modules:
            name = prefix + module
            if module == _CONDITIONS and name not in own:
                continue
            parts: tuple[str, ...] = _ADAPTED[::-1] if backward else _ADAPTED
            if module in without_base:
                parts = tuple(part for part in parts if part.startswith(".lora_"))
            inner = [f"{name}{part}" for part in parts] if f"{name}.base_layer" in own else []
            found.extend(Use(backward, own.get(each, ())) for each in (name, *inner))

    use(_BEFORE, backward=False)
    for number in range(model.blocks):
        use(("", *(f".{module}" for module in _IN_BLOCK)), prefix=f"transformer_blocks.{number}", backward=False)
    use(_AFTER, backward=False)
    modulated = to_inputs or "norm_out.linear" in with_training
    use((m for m in _AFTER_BACKWARD if modulated or m not in ("norm_out.linear", "norm_out.silu")), backward=True)
    first_block = first_backward_block(trained, model.blocks)
    for number in reversed(range(first_block, model.blocks)):
        block, is_last = f"transformer_blocks.{number}", number == model.blocks - 1
        use([""] if is_last else ["", ""], prefix=block, backward=True)  # once for each output that counts
        if settings.activation_checkpointing != "none" and number % settings.checkpoint_every == 0:
            # computed again, in the order of forward
            first = len(found)
            use(_IN_BLOCK, prefix=f"{block}.", backward=False)
            found[first:] = [Use(True, again.parameters) for again in found[first:]]
        alive = list(_alive_in_backward(block, is_last=is_last, to_inputs=to_inputs, with_training=with_training))
        without_base: Collection[str] = ()
        if number == first_block and not to_inputs:
            # Nothing goes back to this block's inputs, so only what trains in front of attention takes part.
            trains = {module for module in _PROJECTIONS if f"{block}.{module}" in with_training}
            if trains:
                idle = _PROJECTIONS.keys() - trains
                idle |= {norm for module, norm in _PROJECTIONS.items() if module in idle} | {"txt_norm1", "img_norm1"}
                alive = [module for module in alive if module not in idle]
                without_base = trains
        use(alive, prefix=f"{block}.", backward=True, without_base=without_base)
    if to_inputs:
        use(_BEFORE_BACKWARD, backward=True)
    return tuple(found)


def _alive_in_backward(block: str, *, is_last: bool, to_inputs: bool, with_training: Collection[str]) -> Iterator[str]:
    """Modules of a block through which a gradient goes."""
    for module in _IN_BLOCK_BACKWARD if is_last else _TEXT_BACKWARD + _IN_BLOCK_BACKWARD:
        if is_last and module in (_ATTENTION_TEXT, "attn.to_add_out"):
            continue
        # Modulation depends on the time alone: without training before or in it there is nothing to propagate to.
        if module.startswith(_MODULATION) and not to_inputs:
            layer = f"{block}.{module.partition('.')[0]}.1"
            if layer not in with_training:
                continue
        yield module


@functools.lru_cache(maxsize=64)
def first_backward_block(trained: tuple[Parameter, ...], blocks: int) -> int:
    """Number of the first block through which a gradient goes; 0 if the input side trains."""
    if any(p.name.startswith(_INPUT_SIDE) for p in trained):
        return 0
    return min((p.block for p in trained if p.block is not None), default=blocks)


def _by_module(parameters: Sequence[Parameter]) -> dict[str, tuple[int, ...]]:
    found: dict[str, tuple[int, ...]] = {}
    for place, parameter in enumerate(parameters):
        module = parameter.name.rpartition(".")[0]
        found[module] = (*found.get(module, ()), place)
    return found
