"""Where a run's starting and frozen weights are: in its model folder, or, if that has none, in a checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from qwen_edit_zero.checkpoints.frozen import (
    FrozenInCheckpoint,
    FrozenInFolder,
    FrozenShare,
    FrozenSource,
    share_of_frozen,
)
from qwen_edit_zero.checkpoints.manifest import load_head
from qwen_edit_zero.edit_model.folder import ModelFolder
from qwen_edit_zero.edit_model.freezing import full_shape
from qwen_edit_zero.edit_model.initial import initial_source
from qwen_edit_zero.edit_model.lora import base_name
from qwen_edit_zero.errors import CheckpointError, SettingsError
from qwen_edit_zero.flat_state import PARAM, TensorSource
from qwen_edit_zero.settings.models import Settings


def starting_weights(folder: ModelFolder, module: torch.nn.Module, *, seed: int) -> TensorSource:
    """What `module` starts from; zeros, all of which a checkpoint must then replace, if the folder has no weights."""
    if folder.has_weights:
        return initial_source(folder, module, seed=seed)
    return _Zeros({name: full_shape(parameter) for name, parameter in module.named_parameters()})


class _Zeros:
    def __init__(self, shapes: dict[str, tuple[int, ...]]) -> None:
        self._shapes = shapes

    def names(self, kind: str = PARAM) -> Iterable[str]:
        return self._shapes if kind == PARAM else ()

    def shape(self, name: str, kind: str = PARAM) -> tuple[int, ...]:
        return self._shapes[name]

    def read(self, name: str, start: int, length: int, kind: str = PARAM) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.bfloat16).expand(length)


def base_fingerprint(settings: Settings, folder: ModelFolder, checkpoint: Path | None) -> str:
    """The fingerprint of the model trained from: of the folder, or, if it has no weights, told by the checkpoint.

    Raises ModelFolderError if there is neither, CheckpointError if the checkpoint lacks frozen weights or is of another
    transformer, SettingsError if later checkpoints would refer to weights that are nowhere.
    """
    if folder.has_weights:
        return folder.fingerprint
    if checkpoint is None:
        raise folder.no_weights()
    model = load_head(checkpoint).model
    if not model.all_stored:
        raise CheckpointError(
            f"{checkpoint} refers to {folder.path} for {len(model.frozen)} frozen parameters, and there are no weights "
            "of the transformer there. Bring them back; with checkpoint.frozen=full checkpoints have all weights"
        )
    if dict(model.config) != folder.transformer_config:
        raise CheckpointError(
            f"{checkpoint} is of another transformer than {folder.path / 'transformer' / 'config.json'} describes"
        )
    if model.frozen and settings.checkpoint.frozen != "full":
        raise SettingsError(
            f"checkpoint.frozen is {settings.checkpoint.frozen}, but there are no weights of the transformer in "
            f"{folder.path} that checkpoints could refer to. Set it to full"
        )
    return model.fingerprint


def frozen_share(
    settings: Settings, folder: ModelFolder, module: torch.nn.Module, checkpoint: Path | None, *, rank: int, world: int
) -> FrozenShare | None:
    """What this rank writes of the frozen parameters, if checkpoints are to have them.

    `checkpoint` is the one that the run goes on from; if the folder has no weights, it is kept to the end of the run.
    """
    names = [name for name, parameter in module.named_parameters() if not parameter.requires_grad]
    if settings.checkpoint.frozen != "full" or not names:
        return None
    source: FrozenSource
    if folder.has_weights:
        stored = folder.shards["transformer"].tensors
        source = FrozenInFolder({name: stored[base_name(name)] for name in names})
    else:
        assert checkpoint is not None
        source = FrozenInCheckpoint(checkpoint)
    return share_of_frozen(source, names, rank=rank, world_size=world)
