"""Low-rank adapters: adding them, their seeded start values, and writing them as a file that diffusers loads."""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from diffusers.loaders import QwenImageLoraLoaderMixin
from peft import LoraConfig

from qwen_edit_zero.errors import ModelFolderError, SettingsError
from qwen_edit_zero.settings.models import LoraSettings

if TYPE_CHECKING:
    from diffusers import QwenImageTransformer2DModel

_A, _B = ".lora_A.default.", ".lora_B.default."


def add_lora(module: QwenImageTransformer2DModel, lora: LoraSettings) -> None:
    """Add adapters to every module whose name ends in one of `lora.targets`, and freeze everything else.

    Base weights of these modules get `.base_layer.` into their names. Raises SettingsError for a target that names
    nothing, with the nearest names that exist.
    """
    linear = [name for name, m in module.named_modules() if isinstance(m, torch.nn.Linear)]
    for target in lora.targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            endings = sorted({re.sub(r"^transformer_blocks\.\d+\.", "", name) for name in linear})
            near = difflib.get_close_matches(target, endings, n=3, cutoff=0.4)
            raise SettingsError(
                f"model.lora.targets: no linear layer of the transformer ends in {target!r}; "
                f"{'nearest' if near else 'there are'}: {', '.join(near or endings)}"
            )
    module.add_adapter(lora_config(lora))
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(is_adapter(name))


def lora_config(lora: LoraSettings) -> LoraConfig:
    """The same settings as peft's class."""
    return LoraConfig(r=lora.rank, lora_alpha=lora.alpha or lora.rank, target_modules=list(lora.targets))


def is_adapter(name: str) -> bool:
    """Whether a parameter of the module is part of an adapter."""
    return _A in name or _B in name


def base_name(name: str) -> str:
    """A parameter's name before adapters were added (`to_q.base_layer.weight` -> `to_q.weight`)."""
    return name.replace(".base_layer.", ".")


def initial_adapter(name: str, shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Start value of an adapter matrix: a function of its name, shape and the seed alone, on every rank and engine.

    B is zero, so that training starts from the base model. A (rank, inputs) is uniform in +-1/sqrt(inputs), peft's own
    choice (`kaiming_uniform_` with a = sqrt(5), after https://github.com/microsoft/LoRA).
    """
    if _B in name:
        return torch.zeros(shape)
    digest = hashlib.blake2b(f"lora {seed} {name}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(shape).uniform_(-1 / math.sqrt(shape[1]), 1 / math.sqrt(shape[1]), generator=generator)


def save_lora(folder: Path, weights: Iterable[tuple[str, torch.Tensor]], lora: LoraSettings) -> Path:
    """Write adapters as `folder/pytorch_lora_weights.safetensors`, which `pipeline.load_lora_weights(folder)` takes.

    `weights` are (module parameter name, whole tensor) pairs, as `ParallelEngine.full_weights` gives them; base
    weights among them are passed over. Rank and alpha are stored too. Raises ModelFolderError if an adapter has no
    elements or lacks its other half.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        if is_adapter(name):
            if tensor.numel() == 0:
                raise ModelFolderError(f"adapter {name} has no elements; it was gathered while still partitioned")
            tensors[name.replace(".default.", ".")] = tensor.detach().cpu().contiguous()
    _check_pairs(tensors)
    metadata: dict[str, Any] = lora_config(lora).to_dict()
    metadata["target_modules"] = sorted(metadata["target_modules"])
    QwenImageLoraLoaderMixin.save_lora_weights(
        folder, transformer_lora_layers=tensors, transformer_lora_adapter_metadata=_plain(metadata)
    )
    return folder / "pytorch_lora_weights.safetensors"


def _check_pairs(tensors: Mapping[str, torch.Tensor]) -> None:
    if not tensors:
        raise ModelFolderError("there are no adapter weights to write: this model was trained without model.lora")
    for name in tensors:
        other = name.replace(".lora_A.", ".lora_B.") if ".lora_A." in name else name.replace(".lora_B.", ".lora_A.")
        if other not in tensors:
            raise ModelFolderError(f"adapter {name} is there but {other} is not; the two only work together")


def _plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Only what JSON can hold and the loader needs."""
    kept = ("r", "lora_alpha", "target_modules", "use_rslora", "use_dora", "lora_bias")
    return {key: config[key] for key in kept}
