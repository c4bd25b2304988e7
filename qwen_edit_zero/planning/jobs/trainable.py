"""Which parameters train: adapters, or all but those that shell patterns freeze. As `edit_model` does it."""

from __future__ import annotations

import functools
from fnmatch import fnmatchcase

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.planning.jobs.model import Parameter, TransformerShape, is_adapter
from qwen_edit_zero.settings.models import LoraSettings, ModelSettings


def split(model: TransformerShape, settings: ModelSettings) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
    """(trained, frozen) parameters, each in the order of the module.

    Raises SettingsError for a target or pattern that matches nothing, and if nothing would train.
    """
    return _split(model, settings.lora, settings.freeze)


@functools.lru_cache(maxsize=64)
def _split(
    model: TransformerShape, lora: LoraSettings | None, freeze: tuple[str, ...]
) -> tuple[tuple[Parameter, ...], tuple[Parameter, ...]]:
    parameters = model.parameters() if lora is None else model.with_adapters(lora.rank, lora.targets)
    for pattern in freeze:
        if not any(fnmatchcase(p.name, pattern) for p in parameters):
            raise SettingsError(
                f"model.freeze: no parameter matches {pattern!r}; a name looks like {parameters[0].name}. Patterns are "
                "matched against whole names, so a module's parameters are `MODULE.*`"
            )

    def trains(parameter: Parameter) -> bool:
        if lora is not None and not is_adapter(parameter.name):
            return False
        return not any(fnmatchcase(parameter.name, pattern) for pattern in freeze)

    trained = tuple(p for p in parameters if trains(p))
    if not trained:
        raise SettingsError(f"model.freeze: {', '.join(freeze)} freezes every parameter, so nothing would train")
    moving = set(trained)
    return trained, tuple(p for p in parameters if p not in moving)


@functools.lru_cache(maxsize=64)
def without_gradient(trained: tuple[Parameter, ...], blocks: int) -> tuple[Parameter, ...]:
    """Those that no loss depends on: the last block's text branch behind attention feeds nothing."""
    last = f"transformer_blocks.{blocks - 1}"
    return tuple(p for p in trained if p.name.startswith((f"{last}.attn.to_add_out.", f"{last}.txt_mlp.")))
