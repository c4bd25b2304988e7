"""What consolidation needs of the model folder that was trained from; whoever calls it hands in how to open one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from qwen_edit_zero.errors import ModelFolderError


class BaseTensor(Protocol):
    """A tensor in a safetensors file: `nbytes` bytes at `offset` of `path`; dtype as safetensors names it."""

    @property
    def path(self) -> Path: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def offset(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


class BaseShards(Protocol):
    """All tensors of a component, by name."""

    @property
    def tensors(self) -> Mapping[str, BaseTensor]: ...


class BaseModel(Protocol):
    """A checked model folder in diffusers layout. `shards` and `fingerprint` may lack the transformer's weights."""

    @property
    def path(self) -> Path: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def transformer_config(self) -> Mapping[str, Any]: ...
    @property
    def shards(self) -> Mapping[str, BaseShards]: ...


def transformer_tensors(base: BaseModel) -> Mapping[str, BaseTensor]:
    """The transformer's stored tensors. Raises ModelFolderError for a folder that has only its configuration."""
    if "transformer" not in base.shards:
        raise ModelFolderError(
            f"{base.path / 'transformer'} has no weights, which are needed here; bring them back, or give a copy of "
            "the model that has them as --base"
        )
    return base.shards["transformer"].tensors


OpenModel = Callable[[str], BaseModel]  # takes a folder or `tiny`; raises ModelFolderError
