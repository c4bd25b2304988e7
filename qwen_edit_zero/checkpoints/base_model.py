"""What consolidation needs of the model folder that was trained from; whoever calls it hands in how to open one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol


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
    """A checked model folder in diffusers layout."""

    @property
    def path(self) -> Path: ...
    @property
    def fingerprint(self) -> str: ...
    @property
    def transformer_config(self) -> Mapping[str, Any]: ...
    @property
    def shards(self) -> Mapping[str, BaseShards]: ...


OpenModel = Callable[[str], BaseModel]  # takes a folder or `tiny`; raises ModelFolderError
