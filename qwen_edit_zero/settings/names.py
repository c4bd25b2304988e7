"""Names of all settings, and the nearest one to a name that does not exist."""

from __future__ import annotations

import difflib
import types
from functools import cache
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from qwen_edit_zero.settings.layers import Path, dotted
from qwen_edit_zero.settings.models import Settings

# `precision: bf16` is short for `precision: {mode: bf16}`.
SHORT_FORMS = {"precision": "mode", "schedule": "kind"}

# What the same thing is called elsewhere; a full dotted name, or a sentence where there is no counterpart.
_ELSEWHERE = {
    "learning_rate": "optimizer.lr",
    "weight_decay": "optimizer.weight_decay",
    "max_grad_norm": "optimizer.clip_norm",
    "gradient_clipping": "optimizer.clip_norm",
    "batch_size": "batch.global_size",
    "train_batch_size": "batch.global_size",
    "train_micro_batch_size_per_gpu": "batch.micro_size",
    "per_device_train_batch_size": "batch.micro_size",
    "mixed_precision": "precision.mode",
    "dtype": "precision.mode",
    "lr_scheduler": "schedule.kind",
    "lr_warmup_steps": "schedule.warmup_steps",
    "warmup": "schedule.warmup_steps",
    "max_train_steps": "run.max_steps",
    "steps": "run.max_steps",
    "num_train_epochs": "run.epochs",
    "output_dir": "run.dir",
    "checkpointing_steps": "checkpoint.every",
    "save_every": "checkpoint.every",
    "save_total_limit": "checkpoint.keep",
    "gradient_checkpointing": "model.activation_checkpointing",
    "model_path": "model.path",
    "pretrained_model_name_or_path": "model.path",
    "dataset": "data.manifest",
}
_DERIVED = {"accumulation", "gradient_accumulation_steps", "accumulate_grad_batches", "grad_accum"}


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The section model in an annotation such as `LoraSettings | None`, if there is one."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        return next((model for part in get_args(annotation) if (model := section_of(part))), None)
    return None


def known_names(model: type[BaseModel] = Settings, prefix: Path = ()) -> dict[Path, bool]:
    """Every section and setting by its path; True for sections, whose own settings follow them."""
    names: dict[Path, bool] = {}
    for name, field in model.model_fields.items():
        section = section_of(field.annotation)
        names[*prefix, name] = section is not None
        if section is not None:
            names |= known_names(section, (*prefix, name))
    return names


@cache
def _all_names() -> dict[str, bool]:
    return {dotted(path): is_section for path, is_section in known_names().items()}


def nearest(name: str, among: list[str], cutoff: float = 0.6) -> str | None:
    """The name in `among` that is spelled most like `name`."""
    found = difflib.get_close_matches(name, among, n=1, cutoff=cutoff)
    return found[0] if found else None


def hint_for_unknown(path: Path) -> str:
    """What to write instead of a setting that does not exist."""
    names = _all_names()
    whole, last, section = dotted(path), path[-1], dotted(path[:-1])
    siblings = [
        name.rsplit(".", 1)[-1]
        for name in names
        if name.startswith(f"{section}." if section else "") and name.count(".") == len(path) - 1
    ]
    if last in names and "." in last and not names[last]:
        head, tail = last.rsplit(".", 1)
        return f"write it nested: {head}: {{{tail}: ...}}"
    if last in _DERIVED:
        return "accumulation is derived from batch.global_size, batch.micro_size and the number of ranks"
    if near := nearest(last, siblings, cutoff=0.7):
        return f"did you mean {dotted((*path[:-1], near))}?"
    elsewhere = [name for name, is_section in names.items() if not is_section and name.rsplit(".", 1)[-1] == last]
    if last in _ELSEWHERE:
        elsewhere = [_ELSEWHERE[last]]
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere)}?"
    if near := nearest(last, siblings, cutoff=0.5) or nearest(whole, list(names), cutoff=0.75):
        return f"did you mean {near if '.' in near else dotted((*path[:-1], near))}?"
    return f"{section or 'a recipe'} has: {', '.join(siblings)}"
