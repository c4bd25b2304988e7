"""Names and shapes of the transformer's parameters, from its configuration alone; equal to the real class."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qwen_edit_zero.errors import SettingsError

TIME_CHANNELS = 256  # of the sinusoidal embedding of a time, fixed in diffusers
MLP_RATIO = 4
# Far beyond any model: with more, a plan would take minutes and gigabytes.
_MOST, _MOST_WIDTH = {"num_layers": 1_000, "num_attention_heads": 1_024, "attention_head_dim": 4_096}, 1_000_000
PATCH, VAE_FACTOR = 2, 8  # latent cells a token, pixels a latent cell, each way


@dataclass(frozen=True)
class Parameter:
    """A parameter of the model.

    Attributes:
        name: as in `named_parameters()`.
        block: number of the repeated block it is in; None outside of them.
    """

    name: str
    shape: tuple[int, ...]
    block: int | None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class TransformerShape:
    """The sizes that a `QwenImageTransformer2DModel` is built from.

    Attributes:
        blocks: repeated blocks.
        heads, head_dim: attention heads of a block, and elements of each.
        in_channels, out_channels: elements of a token that goes in; latent channels of one that comes out.
        patch_size: latent cells a token, each way.
        text_width: elements of a token of the prompt embedding.
        zero_cond_t: pictures are modulated at sigma and at 0 (2511).
        time_condition: there is a table of two more conditions beside the time (layered models).
    """

    blocks: int
    heads: int
    head_dim: int
    in_channels: int
    out_channels: int
    patch_size: int
    text_width: int
    zero_cond_t: bool = False
    time_condition: bool = False

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> TransformerShape:
        """Read a `transformer/config.json`; what it leaves out is as in the class.

        Raises SettingsError for sizes of which no model can be built.
        """

        def size(key: str, usual: int) -> int:
            value = config.get(key)
            if value is None:
                return usual
            most = _MOST.get(key, _MOST_WIDTH)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise SettingsError(
                    f"the transformer's configuration says {key} = {value!r}; it must be from 1 to {most:,}"
                )
            return value

        shape = cls(
            blocks=size("num_layers", 60),
            heads=size("num_attention_heads", 24),
            head_dim=size("attention_head_dim", 128),
            in_channels=size("in_channels", 64),
            out_channels=size("out_channels", 16 if "out_channels" not in config else size("in_channels", 64)),
            patch_size=size("patch_size", 2),
            text_width=size("joint_attention_dim", 3584),
            zero_cond_t=bool(config.get("zero_cond_t")),
            time_condition=bool(config.get("use_additional_t_cond")),
        )
        axes = tuple(config.get("axes_dims_rope") or (16, 56, 56))
        if sum(axes) != shape.head_dim or any(axis % 2 for axis in axes):
            raise SettingsError(
                f"the transformer's configuration says axes_dims_rope = {list(axes)} and attention_head_dim = "
                f"{shape.head_dim}: positions take all of a head, so the axes must be even and add up to it"
            )
        return shape

    @property
    def width(self) -> int:
        """Elements of a token inside of the model."""
        return self.heads * self.head_dim

    def parameters(self) -> tuple[Parameter, ...]:
        """All parameters of the model without adapters, in the order of the module."""
        return _parameters(self)

    def adapters(self, rank: int, targets: Sequence[str]) -> tuple[Parameter, ...]:
        """The LoRA parameters that `targets`, endings of module names, give; in the order of the module.

        Raises SettingsError for a target that names no linear layer.
        """
        return tuple(p for p in self.with_adapters(rank, targets) if is_adapter(p.name))

    def with_adapters(self, rank: int, targets: Sequence[str]) -> tuple[Parameter, ...]:
        """All parameters of the model with LoRA adapters, named and ordered as peft does."""
        return _with_adapters(self, rank, tuple(targets))

    def block_elements(self) -> int:
        """Elements of one block, without adapters."""
        return sum(p.elements for p in self.parameters() if p.block == 0)


def is_adapter(name: str) -> bool:
    """Whether a parameter is part of a LoRA adapter."""
    return ".lora_A.default." in name or ".lora_B.default." in name


def _linear(name: str, out: int, inputs: int, block: int | None) -> Iterator[Parameter]:
    yield Parameter(f"{name}.weight", (out, inputs), block)
    yield Parameter(f"{name}.bias", (out,), block)


@functools.lru_cache(maxsize=64)
def _parameters(shape: TransformerShape) -> tuple[Parameter, ...]:
    width = shape.width
    outer: list[Parameter] = []
    outer += _linear("time_text_embed.timestep_embedder.linear_1", width, TIME_CHANNELS, None)
    outer += _linear("time_text_embed.timestep_embedder.linear_2", width, width, None)
    if shape.time_condition:
        outer.append(Parameter("time_text_embed.addition_t_embedding.weight", (2, width), None))
    outer.append(Parameter("txt_norm.weight", (shape.text_width,), None))
    outer += _linear("img_in", width, shape.in_channels, None)
    outer += _linear("txt_in", width, shape.text_width, None)
    for number in range(shape.blocks):
        outer += _block(shape, number)
    outer += _linear("norm_out.linear", 2 * width, width, None)
    outer += _linear("proj_out", shape.patch_size**2 * shape.out_channels, width, None)
    return tuple(outer)


def _block(shape: TransformerShape, number: int) -> Iterator[Parameter]:
    prefix, width, inner = f"transformer_blocks.{number}", shape.width, MLP_RATIO * shape.width
    head = (shape.head_dim,)
    yield from _linear(f"{prefix}.img_mod.1", 6 * width, width, number)
    for name in ("norm_q", "norm_k"):
        yield Parameter(f"{prefix}.attn.{name}.weight", head, number)
    projections = ("to_q", "to_k", "to_v", "add_k_proj", "add_v_proj", "add_q_proj", "to_out.0", "to_add_out")
    for name in projections:
        yield from _linear(f"{prefix}.attn.{name}", width, width, number)
    for name in ("norm_added_q", "norm_added_k"):
        yield Parameter(f"{prefix}.attn.{name}.weight", head, number)
    yield from _linear(f"{prefix}.img_mlp.net.0.proj", inner, width, number)
    yield from _linear(f"{prefix}.img_mlp.net.2", width, inner, number)
    yield from _linear(f"{prefix}.txt_mod.1", 6 * width, width, number)
    yield from _linear(f"{prefix}.txt_mlp.net.0.proj", inner, width, number)
    yield from _linear(f"{prefix}.txt_mlp.net.2", width, inner, number)


@functools.lru_cache(maxsize=64)
def _with_adapters(shape: TransformerShape, rank: int, targets: tuple[str, ...]) -> tuple[Parameter, ...]:
    plain = shape.parameters()
    # Of matrices, only the table of conditions is no linear layer.
    linear = [
        p.name.removesuffix(".weight") for p in plain if len(p.shape) == 2 and "addition_t_embedding" not in p.name
    ]
    for target in targets:
        if not any(_ends_in(name, target) for name in linear):
            raise SettingsError(f"model.lora.targets: no linear layer of the transformer ends in {target!r}")
    adapted = {name for name in linear if any(_ends_in(name, target) for target in targets)}
    found: list[Parameter] = []
    for parameter in plain:
        module, _, kind = parameter.name.rpartition(".")
        if module not in adapted:
            found.append(parameter)
            continue
        found.append(Parameter(f"{module}.base_layer.{kind}", parameter.shape, parameter.block))
        if kind == "weight":
            out, inputs = parameter.shape
        else:
            found.append(Parameter(f"{module}.lora_A.default.weight", (rank, inputs), parameter.block))
            found.append(Parameter(f"{module}.lora_B.default.weight", (out, rank), parameter.block))
    return tuple(found)


def _ends_in(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")
