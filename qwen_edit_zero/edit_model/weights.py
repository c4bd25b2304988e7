"""The transformer's stored weights as a TensorSource: any range of any tensor, reading only its bytes."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from types import TracebackType

import torch

from qwen_edit_zero.edit_model.folder import ModelFolder
from qwen_edit_zero.errors import ModelFolderError
from qwen_edit_zero.flat_state import PARAM
from qwen_edit_zero.safetensors_file import StoredTensor

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class TransformerWeights:
    """TensorSource over the transformer's safetensors shards.

    Holds no tensor: memory is that of the range being returned. Reads are positional, so threads may share it.
    Raises ModelFolderError on construction if a tensor is stored in a type that cannot be trained from.
    """

    def __init__(self, folder: ModelFolder) -> None:
        self._descriptors: dict[str, int] = {}
        self._tensors = folder.shards["transformer"].tensors
        for name, tensor in self._tensors.items():
            if tensor.dtype not in _DTYPES:
                raise ModelFolderError(
                    f"{tensor.path}: {name} is stored as {tensor.dtype}. Quantised weights cannot be trained from; use "
                    "the bf16 model"
                )

    def names(self, kind: str = PARAM) -> Iterable[str]:
        """Names of the stored parameters; there is nothing of other kinds."""
        return self._tensors.keys() if kind == PARAM else ()

    def shape(self, name: str, kind: str = PARAM) -> tuple[int, ...]:
        """Shape of the whole tensor. Raises KeyError if it is not there."""
        return self._tensor(name, kind).shape

    def read(self, name: str, start: int, length: int, kind: str = PARAM) -> torch.Tensor:
        """Elements `start .. start + length` of the flattened tensor, 1-D on CPU in the stored dtype."""
        stored = self._tensor(name, kind)
        dtype = _DTYPES[stored.dtype]
        assert 0 <= start <= start + length <= math.prod(stored.shape), f"{name}: range {start}+{length}"
        buffer = torch.empty(length, dtype=dtype)
        if length:
            view = buffer.view(torch.uint8).numpy().data
            self._read_into(stored, view, stored.offset + start * dtype.itemsize)
        return buffer

    def close(self) -> None:
        """Close the files. Idempotent; a later read opens them again."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __del__(self) -> None:
        self.close()

    def __enter__(self) -> TransformerWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _tensor(self, name: str, kind: str) -> StoredTensor:
        if kind != PARAM:
            raise KeyError(kind)
        return self._tensors[name]

    def _read_into(self, stored: StoredTensor, view: memoryview, position: int) -> None:
        try:
            descriptor = self._descriptor(str(stored.path))
            done = 0
            while done < len(view):
                got = os.preadv(descriptor, [view[done:]], position + done)
                if got == 0:
                    raise ModelFolderError(f"{stored.path} ended at byte {position + done}: it shrank since the start")
                done += got
        except OSError as error:
            raise ModelFolderError(f"{stored.path} cannot be read: {os.strerror(error.errno or 0)}") from error

    def _descriptor(self, path: str) -> int:
        if path not in self._descriptors:
            opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            kept = self._descriptors.setdefault(path, opened)
            if kept != opened:  # another thread was faster
                os.close(opened)
        return self._descriptors[path]
