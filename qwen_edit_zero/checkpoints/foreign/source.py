"""A checkpoint of another program as a TensorSource: any range of any tensor, reading only its bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np

from qwen_edit_zero.checkpoints.foreign.blocks import Block, Shape
from qwen_edit_zero.checkpoints.foreign.reading import BlockReader
from qwen_edit_zero.checkpoints.precision import Bytes
from qwen_edit_zero.flat_state import PARAM
from qwen_edit_zero.safetensors_file import ITEM_SIZE, element_count

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ForeignTensor:
    """A tensor and where it lies.

    Attributes:
        name: as the program that saved it called it.
        kind: `param`, or an optimizer's moment.
        view: the shape in which `blocks` describe it: its own, or flat.
        find: gives the blocks; called once, when they are needed. Raises CheckpointError.
        role: `trained`, `frozen`, `buffer`, or `` where the format does not tell.
    """

    name: str
    kind: str
    dtype: str
    shape: Shape
    view: Shape
    find: Callable[[], Sequence[Block]]
    role: str = ""

    @cached_property
    def blocks(self) -> Sequence[Block]:
        """Cover every element once."""
        return self.find()

    @property
    def size(self) -> int:
        """Bytes."""
        return element_count(self.shape) * ITEM_SIZE[self.dtype]


@dataclass(frozen=True)
class ForeignGroup:
    """A group of the optimizer: its options when it was saved, and the parameters in it, as the program calls them."""

    weight_decay: float
    lr: float
    names: tuple[str, ...]


@dataclass
class ForeignState:
    """What a folder of another program holds, apart from the numbers.

    Attributes:
        path: the folder itself (the tag's, not its parent).
        format: in words, with the program and its version.
        world_size: ranks that wrote it.
        step: optimizer steps done, None if the format does not tell.
        optimizer_steps: AdamW's own count, which skipped steps do not raise; None without optimizer state.
        parameter_steps: the same for each parameter, where the format tells: those without have done none.
        groups: the optimizer's; empty where the format does not tell.
        samples_seen: None if the format does not tell.
        loss_scale: of fp16 training, else None.
        tensors: by (kind, name).
        tied: name that is not stored -> name of the tensor that is.
        notes: what a user should know: keys resolved, things the format cannot tell.
        files: every file that was looked at.
    """

    path: Path
    format: str
    world_size: int
    step: int | None = None
    optimizer_steps: int | None = None
    parameter_steps: dict[str, int] | None = None
    groups: tuple[ForeignGroup, ...] = ()
    samples_seen: int | None = None
    loss_scale: float | None = None
    tensors: dict[tuple[str, str], ForeignTensor] = field(default_factory=dict)
    tied: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    files: tuple[Path, ...] = ()

    def add(self, tensor: ForeignTensor) -> None:
        """Take a tensor in; its name must be new."""
        assert (tensor.kind, tensor.name) not in self.tensors, tensor.name
        self.tensors[tensor.kind, tensor.name] = tensor

    def mark_trained(self, name: str) -> None:
        """Note that a parameter was given to the optimizer."""
        self.tensors[PARAM, name] = replace(self.tensors[PARAM, name], role="trained")


class ForeignSource:
    """TensorSource over a ForeignState. Threads may share it.

    `finish` compares everything that was read with the checksums in the files.
    """

    def __init__(self, state: ForeignState) -> None:
        self.state = state
        self._reader = BlockReader()

    @property
    def path(self) -> Path:
        """The folder."""
        return self.state.path

    def kinds(self) -> tuple[str, ...]:
        """`param` and the optimizer's moments."""
        return tuple(dict.fromkeys(kind for kind, _ in self.state.tensors))

    def names(self, kind: str = PARAM) -> Iterable[str]:
        """Names of all tensors of this kind."""
        return [name for k, name in self.state.tensors if k == kind]

    def shape(self, name: str, kind: str = PARAM) -> Shape:
        """Shape of the whole tensor. Raises KeyError if it is not there."""
        return self.state.tensors[kind, name].shape

    def dtype(self, name: str, kind: str = PARAM) -> str:
        """Stored dtype, as safetensors names it. Raises KeyError if it is not there."""
        return self.state.tensors[kind, name].dtype

    def tensor(self, name: str, kind: str = PARAM) -> ForeignTensor:
        """All about a tensor. Raises KeyError if it is not there."""
        return self.state.tensors[kind, name]

    def read_bytes(self, name: str, start: int, length: int, kind: str = PARAM) -> Bytes:
        """The bytes of elements `start .. start + length`. Raises CheckpointError naming the file."""
        tensor = self.state.tensors[kind, name]
        assert min(start, length, element_count(tensor.shape) - start - length) >= 0, f"{name}: {start}+{length}"
        item = ITEM_SIZE[tensor.dtype]
        result = np.empty(length * item, dtype=np.uint8)
        self._reader.read_into(tensor.blocks, tensor.view, start, item, result)
        return result

    def read(self, name: str, start: int, length: int, kind: str = PARAM) -> torch.Tensor:
        """Elements `start .. start + length`, as a 1-D CPU tensor in the stored dtype."""
        import torch

        from qwen_edit_zero.checkpoints.rank_file import DTYPE_NAMES

        dtype = next(d for d, text in DTYPE_NAMES.items() if text == self.dtype(name, kind))
        if length == 0:
            return torch.empty(0, dtype=dtype)
        return torch.from_numpy(self.read_bytes(name, start, length, kind)).view(dtype)

    def stream(self, name: str, start: int, length: int, kind: str = PARAM, *, window: int) -> Iterator[Bytes]:
        """Elements `start .. start + length` in windows of at most `window` bytes, each valid until the next."""
        tensor = self.state.tensors[kind, name]
        item = ITEM_SIZE[tensor.dtype]
        step = max(1, window // item)
        buffer = np.empty(min(step, length) * item, dtype=np.uint8)
        for done in range(0, length, step):
            part = buffer[: min(step, length - done) * item]
            self._reader.read_into(tensor.blocks, tensor.view, start + done, item, part)
            yield part

    def revisit(self, name: str, kind: str = PARAM) -> None:
        """Count the records of a tensor as read before, so that `finish` reads and compares them."""
        self._reader.revisit(block.stored for block in self.state.tensors[kind, name].blocks)

    def finish(self) -> None:
        """Compare all records that were read from with their checksums. Raises CheckpointError naming the file."""
        self._reader.finish()

    def verify(self, progress: Callable[[int, int], None] | None = None) -> tuple[str, ...]:
        """Read every byte of every tensor and compare it with the files' checksums; all faults found.

        Raises CheckpointError if a file cannot be described or read at all.
        """
        for tensor in self.state.tensors.values():
            self._reader.revisit(block.stored for block in tensor.blocks)
        done, total = 0, self._reader.bytes_to_compare
        faults = []
        for stored, fault in self._reader.compare():
            done += stored.size
            if fault is not None:
                faults.append(fault)
            if progress is not None:
                progress(done, total)
        return tuple(faults)

    def close(self) -> None:
        """Close the files. Idempotent; a later read opens them again."""
        self._reader.close()

    def __enter__(self) -> ForeignSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
