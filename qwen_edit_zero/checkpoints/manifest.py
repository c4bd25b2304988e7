"""`manifest.json`: what a checkpoint holds and where each element of each tensor lies.

The file is plain JSON, one line a tensor. Its last member, `manifest_xxh3_64`, is the XXH3-64 checksum of all bytes
before it, so that a damaged or edited manifest is never believed.
"""

from __future__ import annotations

import gc
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qwen_edit_zero.checkpoints.layout import MANIFEST
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.safetensors_file import ITEM_SIZE, element_count

FORMAT_VERSION = 1

M = TypeVar("M", bound="ManifestHead")
Json = Any  # what json.loads gives: dict, list, str, int, float, bool or None
Count = Annotated[int, Field(ge=0)]
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class StoredRange(NamedTuple):
    """Elements `start .. start + length` of a flattened tensor.

    They lie in `files[file]` of the manifest, `offset` bytes from that file's start. `xxh3_64` is their checksum.
    """

    file: Count
    offset: Count
    start: Count
    length: Annotated[int, Field(gt=0)]
    xxh3_64: str


class StoredTensor(_Record):
    """A tensor: `kind` is `param` or the optimizer's name of a moment; dtype as safetensors names it.

    `ranges` are sorted by `start` and cover every element once. A tensor without elements has none.
    """

    name: str
    kind: str
    shape: tuple[Count, ...]
    dtype: str
    ranges: tuple[StoredRange, ...]


class FileRecord(_Record):
    """A file of the checkpoint, with its size in bytes and its checksum."""

    name: Annotated[str, Field(pattern=r"^[^/\\]+$")]
    size: Count
    xxh3_64: Checksum


class LoraReference(_Record):
    """The adapters of a LoRA run: `weight + alpha / rank * B A`."""

    rank: Annotated[int, Field(gt=0)]
    alpha: float
    targets: tuple[str, ...]


class ModelReference(_Record):
    """The model that was trained from.

    Attributes:
        path: `tiny` or the (absolute) model folder given to the run.
        fingerprint: identifies the contents of that folder, wherever it lies.
        config: the transformer's `config.json`.
        frozen: parameters that were not trained; they are in the model folder, not in the checkpoint.
        lora: None for full fine-tuning.
    """

    path: str
    fingerprint: str
    config: dict[str, Any]
    frozen: tuple[str, ...] = ()
    lora: LoraReference | None = None


class ManifestHead(_Record):
    """What a manifest says but for the tensors: small, whatever the size of model and cluster."""

    format: Literal["qwen-edit-zero checkpoint"] = "qwen-edit-zero checkpoint"
    format_version: Literal[1] = 1
    save_id: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]  # one a save; each file of the save carries it
    created: str  # UTC, ISO 8601
    package_version: str
    step: Count
    samples_seen: Count | None
    engine: str
    world_size: Annotated[int, Field(gt=0)]
    metrics: dict[str, float] = Field(default_factory=dict)  # of the state saved; lower is better
    settings: dict[str, Any]
    model: ModelReference
    files: tuple[FileRecord, ...]

    @property
    def size(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(f.size for f in self.files)


class Manifest(ManifestHead):
    """Everything about a checkpoint but the numbers themselves."""

    tensors: tuple[StoredTensor, ...]


def coverage_fault(count: int, ranges: Sequence[StoredRange]) -> str | None:
    """Why `ranges`, sorted by start, do not cover elements `0 .. count` exactly once; None if they do."""
    end = 0
    for item in ranges:
        if item.start > end:
            return f"elements {end} to {item.start - 1} are nowhere"
        if item.start < end:
            return f"elements {item.start} to {min(end, item.start + item.length) - 1} are there twice"
        end = item.start + item.length
    if end < count:
        return f"elements {end} to {count - 1} are nowhere"
    return f"there are {end} elements, but its shape has {count}" if end > count else None


class Piece(NamedTuple):
    """The part of a stored range that a read needs: elements `skip .. skip + take` of it go to `at` of the result."""

    stored: StoredRange
    skip: int
    take: int
    at: int


def intersect(ranges: Sequence[StoredRange], start: int, length: int) -> Iterator[Piece]:
    """The pieces, in order, that make up elements `start .. start + length`; `ranges` sorted, without holes."""
    end, position = start + length, start
    index = max(0, bisect_right(ranges, start, key=lambda r: r.start) - 1)
    while position < end:
        stored = ranges[index]
        skip = position - stored.start
        take = min(end - position, stored.length - skip)
        if take > 0:
            yield Piece(stored, skip, take, position - start)
            position += take
        index += 1


_TENSORS_KEY = b',\n"tensors": [\n'  # raw line ends occur between members only: JSON strings escape them
_CHECKSUM_KEY = b',\n"manifest_xxh3_64": "'


def dump_manifest(manifest: Manifest) -> bytes:
    """The content of `manifest.json`, checksum included."""
    lines = []
    for key, value in manifest.model_dump(mode="json", exclude={"files", "tensors"}).items():
        lines.append(f"{json.dumps(key)}: {json.dumps(value, ensure_ascii=False, allow_nan=False)}")
    for key in ("files", "tensors"):
        entries = (_compact(e.model_dump(mode="json")) for e in getattr(manifest, key))
        lines.append(f'"{key}": [\n' + ",\n".join(entries) + "\n]")
    body = ("{\n" + ",\n".join(lines)).encode()
    return body + _CHECKSUM_KEY + xxhash.xxh3_64_hexdigest(body).encode() + b'"\n}\n'


def _compact(value: Mapping[str, Json]) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def parse_manifest(content: bytes) -> Manifest:
    """The manifest in these bytes. Raises CheckpointError, which does not name the file."""
    with _no_garbage_collection():
        manifest = _validate(Manifest, _checked_body(content))
        _check_tensors(manifest)
    return manifest


def parse_head(content: bytes) -> ManifestHead:
    """The same without the tensors; all bytes are compared with the checksum nevertheless."""
    return _validate(ManifestHead, _checked_body(content).partition(_TENSORS_KEY)[0])


def _checked_body(content: bytes) -> bytes:
    """What the checksum covers: the JSON object without its end. Raises CheckpointError."""
    version = re.search(rb'"format_version":\s*(\d+)', content[:400])
    if version and int(version[1]) > FORMAT_VERSION:
        raise CheckpointError(
            f"it has format version {int(version[1])}, and this version of qwen-edit-zero knows up to "
            f"{FORMAT_VERSION}; use the version that wrote it or a newer one"
        )
    body, key, tail = content.rpartition(_CHECKSUM_KEY)
    if not key:
        raise CheckpointError("it does not end with its checksum, so it is cut short or no manifest of this package")
    if tail != xxhash.xxh3_64_hexdigest(body).encode() + b'"\n}\n':
        raise CheckpointError("its content does not match its own checksum, so it is damaged or was edited")
    return body


def _validate(kind: type[M], body: bytes) -> M:
    try:
        return kind.model_validate_json(body + b"\n}")
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"its member {where or 'as a whole'} is wrong: {first['msg']}") from None


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """The collector, which would walk millions of new tuples again and again, takes two thirds of the time else."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _check_tensors(manifest: Manifest) -> None:
    seen = set()
    for tensor in manifest.tensors:
        label = f"tensor {tensor.name} ({tensor.kind})"
        if (tensor.kind, tensor.name) in seen:
            raise CheckpointError(f"{label} is listed twice")
        seen.add((tensor.kind, tensor.name))
        if tensor.dtype not in ITEM_SIZE:
            raise CheckpointError(f"{label} has the unknown dtype {tensor.dtype}")
        if fault := coverage_fault(element_count(tensor.shape), tensor.ranges):
            raise CheckpointError(f"{label}: {fault}")
        size = ITEM_SIZE[tensor.dtype]
        for item in tensor.ranges:
            if item.file >= len(manifest.files) or item.offset + item.length * size > manifest.files[item.file].size:
                raise CheckpointError(f"{label}: its elements from {item.start} lie beyond the end of their file")


def load_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint folder. Raises CheckpointError naming the folder or the file."""
    return _load(checkpoint, parse_manifest)


def load_head(checkpoint: Path) -> ManifestHead:
    """The same without the tensors, quick at any size."""
    return _load(checkpoint, parse_head)


def _load(checkpoint: Path, parse: Callable[[bytes], M]) -> M:
    path = checkpoint / MANIFEST
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        there = checkpoint.is_dir()
        why = "has no manifest.json, so it was never finished or is no checkpoint" if there else "is not there"
        raise CheckpointError(f"{checkpoint} {why}") from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    try:
        return parse(content)
    except CheckpointError as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from None
