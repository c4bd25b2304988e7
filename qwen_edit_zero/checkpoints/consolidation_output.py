"""What consolidation writes: tensors made of parts, laid out in weight files before the first byte is there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

from qwen_edit_zero.checkpoints.precision import Bytes
from qwen_edit_zero.safetensors_file import ITEM_SIZE, build_header

WEIGHTS = "diffusion_pytorch_model"
PART = 16 * 2**20  # elements of a part: what one thread does at a time, and what is done again after an interruption
WINDOW = 2**20  # bytes read at a time; small enough to stay in the processor's cache while they are converted


@dataclass(frozen=True)
class Part:
    """Elements `start .. start + length` of a flattened tensor; `windows()` gives their bytes in order, converted.

    `windows` may be called from any thread. `skip` is called instead if an earlier, interrupted run wrote the part.
    """

    start: int
    length: int
    windows: Callable[[], Iterator[Bytes]]
    skip: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to write. Its parts make it up in order."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    parts: Sequence[Part]

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * ITEM_SIZE[self.dtype]


@dataclass(frozen=True)
class OutputFile:
    """A weight file: header, and the offset at which each tensor's bytes begin."""

    name: str
    header: bytes
    tensors: Sequence[tuple[OutputTensor, int]]
    size: int


def cut(count: int, elements: int = PART) -> Iterator[tuple[int, int]]:
    """Start and length of the stretches of at most `elements` that make up `count` elements."""
    for start in range(0, count, elements):
        yield start, min(elements, count - start)


def split_shards(tensors: Sequence[OutputTensor], shard_bytes: int) -> list[list[OutputTensor]]:
    """Fill files in order, each up to `shard_bytes`; a larger tensor gets a file of its own."""
    shards: list[list[OutputTensor]] = [[]]
    room = shard_bytes
    for tensor in tensors:
        if shards[-1] and tensor.size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.size
    return shards


def lay_out(tensors: Sequence[OutputTensor], shard_bytes: int) -> list[OutputFile]:
    """The files that these tensors become, named as diffusers names them."""
    shards = split_shards(tensors, shard_bytes)
    files = []
    for number, shard in enumerate(shards, start=1):
        name = f"{WEIGHTS}-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else WEIGHTS
        header = build_header([(t.name, t.dtype, t.shape) for t in shard], {"format": "pt"})
        placed, position = [], len(header)
        for tensor in shard:
            placed.append((tensor, position))
            position += tensor.size
        files.append(OutputFile(f"{name}.safetensors", header, placed, position))
    return files


def index_of(files: Sequence[OutputFile]) -> dict[str, object]:
    """The content of `diffusion_pytorch_model.safetensors.index.json`."""
    total = sum(tensor.size for file in files for tensor, _ in file.tensors)
    return {"metadata": {"total_size": total}, "weight_map": {t.name: f.name for f in files for t, _ in f.tensors}}
