"""Frozen parameters in a checkpoint: what a rank writes of them, streamed from where they are stored.

They come from the model folder as it has them, not from an engine, which keeps them in the precision it computes in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch

from qwen_edit_zero.checkpoints.base_model import BaseTensor
from qwen_edit_zero.checkpoints.disk import OpenFiles
from qwen_edit_zero.checkpoints.rank_file import DTYPE_NAMES
from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.errors import StorageError
from qwen_edit_zero.flat_state import FROZEN, FlatRange
from qwen_edit_zero.safetensors_file import ITEM_SIZE, element_count

_WINDOW = 4 * 2**20  # bytes read at once


class FrozenSource(Protocol):
    """Where the frozen parameters are stored, by the names of the module that trains."""

    def dtype(self, name: str) -> str:
        """As safetensors names it."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole parameter."""
        ...

    def stream(self, name: str, start: int, length: int) -> Iterator[memoryview]:
        """The bytes of elements `start .. start + length` in pieces, each valid until the next. Raises StorageError."""
        ...


class FrozenInFolder:
    """Those of a model folder. Raises StorageError once a file is not as it was at the start."""

    def __init__(self, tensors: Mapping[str, BaseTensor]) -> None:
        self._tensors = tensors
        self._stamps = {path: _stamp(path) for path in {tensor.path for tensor in tensors.values()}}

    def dtype(self, name: str) -> str:
        """See `FrozenSource`."""
        return self._tensors[name].dtype

    def shape(self, name: str) -> tuple[int, ...]:
        """See `FrozenSource`."""
        return tuple(self._tensors[name].shape)

    def stream(self, name: str, start: int, length: int) -> Iterator[memoryview]:
        """See `FrozenSource`."""
        tensor = self._tensors[name]
        item = ITEM_SIZE[tensor.dtype]
        if _stamp(tensor.path) != self._stamps[tensor.path]:
            raise StorageError(
                f"{tensor.path} has changed since the run began, so its frozen {name} may not be what was trained "
                "with; bring the file back, or set checkpoint.frozen to reference"
            )
        files, buffer = OpenFiles(), np.empty(min(_WINDOW, length * item), dtype=np.uint8)
        try:
            for done in range(0, length * item, _WINDOW):
                part = buffer[: min(_WINDOW, length * item - done)]
                files.read_into(tensor.path, tensor.offset + start * item + done, part.data)
                yield part.data
        except OSError as error:
            raise StorageError(
                f"cannot read {tensor.path}: {error.strerror}; checkpoint.frozen=full copies the frozen {name} from it"
            ) from None
        finally:
            files.close()


def _stamp(path: Path) -> tuple[int, int]:
    try:
        stat = path.stat()
    except OSError as error:
        raise StorageError(
            f"cannot read {path}: {error.strerror}; checkpoint.frozen=full copies frozen parameters from it"
        ) from None
    return stat.st_size, stat.st_mtime_ns


class FrozenInCheckpoint:
    """Those of a checkpoint that has them. It is kept, whatever retention says, until `close`."""

    def __init__(self, path: Path) -> None:
        self._reader = CheckpointReader(path)

    def dtype(self, name: str) -> str:
        """See `FrozenSource`."""
        return self._reader.dtype(name, FROZEN)

    def shape(self, name: str) -> tuple[int, ...]:
        """See `FrozenSource`."""
        return self._reader.shape(name, FROZEN)

    def stream(self, name: str, start: int, length: int) -> Iterator[memoryview]:
        """See `FrozenSource`."""
        step = _WINDOW // ITEM_SIZE[self.dtype(name)]
        for done in range(0, length, step):
            yield self._reader.read_bytes(name, start + done, min(step, length - done), FROZEN).data

    def close(self) -> None:
        """Let the checkpoint go."""
        self._reader.close()


@dataclass(frozen=True)
class FrozenShare:
    """What one rank writes: elements `start .. start + length` of some parameters."""

    source: FrozenSource
    pieces: tuple[tuple[str, int, int], ...]

    def ranges(self) -> Iterator[FlatRange]:
        """The layout alone: values without memory."""
        types = {text: dtype for dtype, text in DTYPE_NAMES.items()}
        for name, start, length in self.pieces:
            values = torch.empty(length, dtype=types[self.source.dtype(name)], device="meta")
            yield FlatRange(name, FROZEN, self.source.shape(name), start, values)

    def data(self) -> Iterator[Iterator[memoryview]]:
        """The bytes of each range, in order."""
        for name, start, length in self.pieces:
            yield self.source.stream(name, start, length)


def share_of_frozen(source: FrozenSource, names: Iterable[str], *, rank: int, world_size: int) -> FrozenShare:
    """What a rank writes of the parameters `names`: laid end to end, they are cut into equal stretches of bytes."""
    sizes = {name: (element_count(source.shape(name)), ITEM_SIZE[source.dtype(name)]) for name in names}
    total = sum(count * item for count, item in sizes.values())
    first, end = total * rank // world_size, total * (rank + 1) // world_size
    pieces, offset = [], 0
    for name, (count, item) in sizes.items():
        low = min(max(-(-(first - offset) // item), 0), count)
        high = min(max(-(-(end - offset) // item), 0), count)
        offset += count * item
        if low < high:
            pieces.append((name, low, high - low))
    return FrozenShare(source, tuple(pieces))
