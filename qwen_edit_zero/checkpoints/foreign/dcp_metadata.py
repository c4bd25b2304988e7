"""`.metadata` of a torch distributed checkpoint: which tensors there are, and where the chunks of each lie.

It is a plain pickle of torch.distributed.checkpoint.metadata.Metadata; each chunk is a file of torch.save inside a
`__RANK_NUMBER.distcp` file (torch/distributed/checkpoint/filesystem.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from qwen_edit_zero.checkpoints.foreign.blocks import Block, Shape, cover_fault, row_major
from qwen_edit_zero.checkpoints.foreign.pickles import Dtype, PickledTensor, Record, load_pickle
from qwen_edit_zero.checkpoints.foreign.torch_files import StoredBytes, TorchFile, read_torch_file
from qwen_edit_zero.errors import CheckpointError

METADATA = ".metadata"


@dataclass(frozen=True, slots=True)
class Stretch:
    """`size` bytes at `offset` of a file of the folder: one chunk."""

    path: Path
    offset: int
    size: int

    def open(self) -> TorchFile:
        """What torch.save wrote there. Raises CheckpointError naming the file."""
        return read_torch_file(self.path, self.offset, self.size)


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor and where it is."""

    corner: Shape
    sizes: Shape
    stretch: Stretch


@dataclass(frozen=True)
class Entry:
    """A tensor of the folder, under its key in the flattened state dict."""

    key: str
    dtype: str
    shape: Shape
    chunks: tuple[Chunk, ...]

    def blocks(self) -> tuple[Block, ...]:
        """Where the elements lie; looks into every chunk. Raises CheckpointError naming the file."""
        return tuple(self._block(chunk) for chunk in self.chunks)

    def _block(self, chunk: Chunk) -> Block:
        file = chunk.stretch.open()
        tensor = file.value
        if not isinstance(tensor, PickledTensor) or (tensor.shape, tensor.dtype) != (chunk.sizes, self.dtype):
            found = f"{tensor.dtype} {list(tensor.shape)}" if isinstance(tensor, PickledTensor) else "no tensor"
            raise CheckpointError(
                f"{file.path}, byte {chunk.stretch.offset}: {METADATA} promises {self.dtype} {list(chunk.sizes)} of "
                f"{self.key}, but there is {found}: they are of different saves"
            )
        return Block(file.storage_of(tensor, self.key), tensor.first, chunk.corner, chunk.sizes, tensor.strides)


@dataclass(frozen=True)
class DcpMetadata:
    """All of a folder.

    Attributes:
        tensors: by key.
        objects: pickled things that are no tensors, by key.
        paths: the nested keys that a key was flattened from, in the order of the state dict; empty if unknown.
        files: every data file named.
    """

    folder: Path
    tensors: dict[str, Entry] = field(default_factory=dict)
    objects: dict[str, Stretch] = field(default_factory=dict)
    paths: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    files: tuple[Path, ...] = ()


def read_metadata(folder: Path) -> DcpMetadata:
    """Describe a folder, after checking that all files are there and every element of every tensor is, once.

    Raises CheckpointError naming file and tensor.
    """
    path = folder / METADATA
    try:
        content = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    try:
        saved = load_pickle(content)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    entries = saved.get("state_dict_metadata") if isinstance(saved, Record) else None
    storage = saved.get("storage_data") if isinstance(saved, Record) else None
    if not isinstance(entries, Mapping) or not isinstance(storage, Mapping):
        raise CheckpointError(f"{path} is no metadata of a torch distributed checkpoint")
    places = _places(folder, path, storage)
    _check_files(folder, places)
    found = DcpMetadata(folder, files=tuple(sorted({s.path for s in places.values()})))
    planner = saved.get("planner_data")
    if isinstance(planner, Mapping):
        found.paths.update({str(k): tuple(v) for k, v in planner.items() if isinstance(v, tuple | list)})
    for key, entry in entries.items():
        if isinstance(entry, Record) and entry.get("chunks") is not None:
            found.tensors[key] = _entry(path, key, entry, places)
        elif (key, None) in places:
            found.objects[key] = places[key, None]
    return found


Places = Mapping[tuple[str, Shape | None], Stretch]


def _places(folder: Path, path: Path, storage: Mapping[Any, Any]) -> Places:
    places: dict[tuple[str, Shape | None], Stretch] = {}
    for index, info in storage.items():
        name, offset, size = (info.get(k) for k in ("relative_path", "offset", "length"))
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(f"{path} names the file {name!r}, which leads out of its folder")
        if info.get("transform_descriptors"):
            raise CheckpointError(
                f"{folder} is compressed ({info.get('transform_descriptors')}), which is not read here"
            )
        corner = index.get("offset")
        places[index.get("fqn"), None if corner is None else tuple(corner)] = Stretch(folder / name, offset, size)
    return places


def _check_files(folder: Path, places: Places) -> None:
    ends: dict[Path, int] = {}
    for stretch in places.values():
        ends[stretch.path] = max(ends.get(stretch.path, 0), stretch.offset + stretch.size)
    for path, end in sorted(ends.items()):
        try:
            size = os.stat(path).st_size
        except FileNotFoundError:
            rank = path.name.removeprefix("__").split("_")[0]
            raise CheckpointError(
                f"{folder} misses {path.name}, which rank {rank} wrote; it may be on another node's disk"
            ) from None
        except OSError as error:
            raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
        if size < end:
            raise CheckpointError(f"{path} is cut short: it has {size} bytes and should have {end}")


def _entry(path: Path, key: str, entry: Record, places: Places) -> Entry:
    shape = tuple(entry.get("size"))
    properties = entry.get("properties")
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.get("dtype")
    if not isinstance(dtype, Dtype):
        raise CheckpointError(f"{path}: {key} has an element type that is not known here")
    chunks = []
    for chunk in entry.get("chunks"):
        corner, sizes = tuple(chunk.get("offsets")), tuple(chunk.get("sizes"))
        stretch = places.get((key, corner)) or places.get((key, None))
        if stretch is None:
            if 0 in sizes:
                continue
            raise CheckpointError(f"{path}: the part of {key} at {list(corner)} is in no file")
        if len(corner) != len(shape) or len(sizes) != len(shape):
            raise CheckpointError(f"{path}: {key} of shape {list(shape)} has a part of shape {list(sizes)}")
        chunks.append(Chunk(corner, sizes, stretch))
    boxes = [Block(StoredBytes(c.stretch.path, 0, 0, None), 0, c.corner, c.sizes, row_major(c.sizes)) for c in chunks]
    if fault := cover_fault(boxes, shape):
        raise CheckpointError(f"{path}: {key} of shape {list(shape)}: {fault}")
    return Entry(key, dtype.name, shape, tuple(c for c in chunks if 0 not in c.sizes))
