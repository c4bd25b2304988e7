"""Reading any range of any tensor of a checkpoint, whatever wrote it."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import xxhash

from qwen_edit_zero.checkpoints import layout
from qwen_edit_zero.checkpoints.disk import CHUNK_BYTES, OpenFiles
from qwen_edit_zero.checkpoints.in_use import ReadLock
from qwen_edit_zero.checkpoints.manifest import Json, Manifest, StoredTensor, load_manifest
from qwen_edit_zero.checkpoints.ranges import StoredRange, intersect
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.flat_state import PARAM
from qwen_edit_zero.safetensors_file import ITEM_SIZE, element_count

if TYPE_CHECKING:
    import torch

Bytes = npt.NDArray[np.uint8]


class DamagedError(CheckpointError):
    """A checkpoint, or part of it, is not what was written; `fault` says what, without advice."""

    def __init__(self, fault: str) -> None:
        super().__init__(f"{fault}. Use another checkpoint or a backup")
        self.fault = fault


class CheckpointReader:
    """TensorSource over a checkpoint folder. Holds the manifest and a few open files, no tensor.

    Attributes:
        path: the folder.
        manifest: what it holds.
        compared: for each row of the table of ranges whether this reader has compared that range with its checksum.
        bytes_read: of the data files, so far.
        on_read: called after each piece that was read, if given.

    Raises CheckpointError on construction if the manifest cannot be used. The data files are looked at when they are
    read; `check_checkpoint` looks at all of them beforehand.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = ReadLock(path)
        try:
            self.manifest: Manifest = load_manifest(path)
        except CheckpointError:
            self._lock.release()
            raise
        self._tensors = {(t.kind, t.name): t for t in self.manifest.tensors}
        self._files = OpenFiles()
        self.compared = np.zeros(sum(len(t.ranges) for t in self.manifest.tensors), dtype=np.bool_)
        self.bytes_read = 0
        self.on_read: Callable[[], None] | None = None

    def another(self) -> CheckpointReader:
        """A reader of the same checkpoint for another thread: it shares the manifest, but no open file."""
        other = copy.copy(self)
        other._files = OpenFiles()
        other._lock = ReadLock(self.path)
        return other

    @property
    def step(self) -> int:
        """Optimizer steps done when it was written."""
        return self.manifest.step

    @cached_property
    def run_state(self) -> dict[str, Json]:
        """The counters given to `save_checkpoint`. Raises CheckpointError if the file is damaged."""
        file = self.path / layout.RUN_STATE
        try:
            content = file.read_bytes()
        except OSError as error:
            raise CheckpointError(f"cannot read {file}: {error.strerror}") from None
        expected = next((f.xxh3_64 for f in self.manifest.files if f.name == layout.RUN_STATE), None)
        if xxhash.xxh3_64_hexdigest(content) != expected:
            raise CheckpointError(f"{file} is damaged or was edited: its checksum is not the one in the manifest")
        state: dict[str, Json] = json.loads(content)
        return state

    def kinds(self) -> tuple[str, ...]:
        """All kinds, in order: `param` and the optimizer's moments."""
        return tuple(dict.fromkeys(t.kind for t in self.manifest.tensors))

    def names(self, kind: str = PARAM) -> Iterable[str]:
        """Names of all tensors of this kind."""
        return [t.name for t in self.manifest.tensors if t.kind == kind]

    def shape(self, name: str, kind: str = PARAM) -> tuple[int, ...]:
        """Shape of the whole tensor. Raises KeyError if it is not there."""
        return self._tensors[kind, name].shape

    def dtype(self, name: str, kind: str = PARAM) -> str:
        """Stored dtype, as safetensors names it. Raises KeyError if it is not there."""
        return self._tensors[kind, name].dtype

    def torch_dtype(self, name: str, kind: str = PARAM) -> torch.dtype:
        """Stored dtype. Raises KeyError if the tensor is not there."""
        from qwen_edit_zero.checkpoints.rank_file import DTYPE_NAMES

        stored = self.dtype(name, kind)
        return next(dtype for dtype, text in DTYPE_NAMES.items() if text == stored)

    def read(self, name: str, start: int, length: int, kind: str = PARAM) -> torch.Tensor:
        """Elements `start .. start + length`, as a 1-D CPU tensor in the stored dtype; see `read_bytes`."""
        import torch

        dtype = self.torch_dtype(name, kind)
        if length == 0:
            return torch.empty(0, dtype=dtype)
        return torch.from_numpy(self.read_bytes(name, start, length, kind)).view(dtype)

    def read_bytes(self, name: str, start: int, length: int, kind: str = PARAM) -> Bytes:
        """The bytes of elements `start .. start + length`; only these are read.

        Each stored range that is read as a whole is compared with its checksum (part of one cannot be).
        Raises CheckpointError naming the file if it is missing, too short or damaged; KeyError for an unknown name.
        """
        tensor = self._tensors[kind, name]
        assert min(start, length, element_count(tensor.shape) - start - length) >= 0, f"{name}: {start}+{length}"
        size = ITEM_SIZE[tensor.dtype]
        result = np.empty(length * size, dtype=np.uint8)
        for piece in intersect(tensor.ranges, start, length):
            part = result[piece.at * size : (piece.at + piece.take) * size]
            self._fill(piece.stored, piece.skip * size, part)
            if piece.take == piece.stored.length:
                self._compare(tensor, piece.number, piece.stored, xxhash.xxh3_64_hexdigest(part.data))
        return result

    def stream(self, name: str, kind: str = PARAM, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Bytes]:
        """All bytes of a tensor in order, in chunks of whole elements, compared with their checksums.

        A chunk is valid until the next one is asked for. Raises as `read_bytes`.
        """
        tensor = self._tensors[kind, name]
        size = ITEM_SIZE[tensor.dtype]
        buffer = np.empty(chunk_bytes // size * size, dtype=np.uint8)
        for index in range(len(tensor.ranges)):
            yield from self._range_chunks(tensor, index, buffer)

    def compare_row(self, row: int, buffer: Bytes) -> None:
        """Read the stored range in this row of the table, through `buffer`, and compare it. Raises as `read_bytes`."""
        tensor = self.manifest.tensors[int(np.searchsorted(self._first_rows, row, side="right")) - 1]
        for _ in self._range_chunks(tensor, row - tensor.ranges.first_row, buffer):
            pass

    @cached_property
    def _first_rows(self) -> npt.NDArray[np.int64]:
        return np.array([t.ranges.first_row for t in self.manifest.tensors], np.int64)

    def _range_chunks(self, tensor: StoredTensor, index: int, buffer: Bytes) -> Iterator[Bytes]:
        stored, digest = tensor.ranges[index], xxhash.xxh3_64()
        total = stored.length * ITEM_SIZE[tensor.dtype]
        for done in range(0, total, len(buffer)):
            chunk = buffer[: min(len(buffer), total - done)]
            self._fill(stored, done, chunk)
            digest.update(chunk.data)
            yield chunk
        self._compare(tensor, index, stored, digest.hexdigest())

    def close(self) -> None:
        """Close the files, and let retention delete them. Idempotent; a later read opens them again."""
        self._files.close()
        self._lock.release()

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _fill(self, stored: StoredRange, skip_bytes: int, target: Bytes) -> None:
        file = self.path / self.manifest.files[stored.file].name
        try:
            self._files.read_into(file, stored.offset + skip_bytes, target.data)
        except OSError as error:
            raise DamagedError(f"cannot read {file}: {error.strerror}") from None
        self.bytes_read += len(target)
        if self.on_read is not None:
            self.on_read()

    def _compare(self, tensor: StoredTensor, index: int, stored: StoredRange, checksum: str) -> None:
        if checksum != stored.xxh3_64:
            raise DamagedError(
                f"{self.path / self.manifest.files[stored.file].name} is damaged: {tensor.name} ({tensor.kind}), "
                f"elements {stored.start} to {stored.start + stored.length - 1}, does not match its checksum"
            )
        self.compared[tensor.ranges.first_row + index] = True
