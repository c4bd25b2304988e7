"""What a checkpoint of a run takes, from shapes in the headers of the model's weight files."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from qwen_edit_zero.edit_model.folder import ModelFolder
from qwen_edit_zero.safetensors_file import element_count
from qwen_edit_zero.settings.models import Settings

_MASTER, _MOMENTS, _SMALL_MOMENTS, _AVERAGE = 4, 8, 2, 4  # bytes a parameter


@dataclass(frozen=True)
class Needs:
    """Elements of the transformer, those that train, and bytes of a checkpoint."""

    elements: int
    trained: int
    checkpoint_bytes: int


def needs_of(settings: Settings, folder: ModelFolder) -> Needs | None:
    """What a run needs; None if the folder has no weights, so no shapes."""
    if not folder.has_weights:
        return None
    tensors = folder.shards["transformer"].tensors
    elements = {name: element_count(tensor.shape) for name, tensor in tensors.items()}
    total, lora = sum(elements.values()), settings.model.lora
    if lora is not None:
        trained = sum(
            lora.rank * sum(tensor.shape)
            for name, tensor in tensors.items()
            if len(tensor.shape) == 2 and _is_adapted(name, lora.targets)
        )
    else:
        patterns = settings.model.freeze
        trained = sum(n for name, n in elements.items() if not any(fnmatchcase(name, p) for p in patterns))
    moments = _SMALL_MOMENTS if settings.optimizer.kind == "adamw_8bit" else _MOMENTS
    each = _MASTER + moments + (_AVERAGE if settings.optimizer.ema is not None else 0)
    size = trained * each
    if settings.checkpoint.frozen == "full":
        frozen = total if lora is not None else total - trained
        size += frozen * sum(tensor.nbytes for tensor in tensors.values()) // max(total, 1)
    return Needs(total, trained, size)


def _is_adapted(name: str, targets: tuple[str, ...]) -> bool:
    module = name.removesuffix(".weight")
    return module != name and any(module == target or module.endswith(f".{target}") for target in targets)
