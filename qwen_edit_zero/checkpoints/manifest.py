"""`manifest.json`: what a checkpoint holds, and `ranges.safetensors`: where each element of each tensor lies.

The first is plain JSON, one line a tensor. Its last member, `manifest_xxh3_64`, is the XXH3-64 checksum of all bytes
before it, so that a damaged or edited manifest is never believed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import xxhash
from pydantic import BaseModel, ConfigDict, Field, SkipValidation, ValidationError

from qwen_edit_zero.checkpoints.columns import parse_columns
from qwen_edit_zero.checkpoints.layout import MANIFEST, RANGES
from qwen_edit_zero.checkpoints.ranges import Ranges, RangeTable
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.safetensors_file import ITEM_SIZE, element_count

FORMAT_VERSION = 2

M = TypeVar("M", bound="ManifestHead")
Json = Any  # what json.loads gives: dict, list, str, int, float, bool or None
Count = Annotated[int, Field(ge=0)]
Checksum = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class TensorRecord(_Record):
    """A tensor: `kind` is `param`, or what belongs to one of that name; dtype as safetensors names it.

    `ranges` is the number of its ranges, which are the next so many rows of the table in `ranges.safetensors`.
    """

    name: str
    kind: str
    shape: tuple[Count, ...]
    dtype: str
    ranges: Count


@dataclass(frozen=True)
class StoredTensor:
    """A tensor and where it lies: `ranges` are sorted by `start` and cover every element once; none if it has none."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    ranges: Ranges


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
        frozen: parameters that were not trained; they are in the model folder.
        frozen_stored: they are in the checkpoint, too, as tensors of the kind `frozen`.
        lora: None for full fine-tuning.
    """

    path: str
    fingerprint: str
    config: dict[str, Any]
    frozen: tuple[str, ...] = ()
    frozen_stored: bool = False
    lora: LoraReference | None = None

    @property
    def folder(self) -> Path | None:
        """Where the model was when the checkpoint was written; None for the built-in one."""
        return Path(self.path) if Path(self.path).is_absolute() else None

    @property
    def all_stored(self) -> bool:
        """Whether the checkpoint has all weights, so that the model folder's are not needed."""
        return self.frozen_stored or not self.frozen


class ManifestHead(_Record):
    """What a manifest says but for the tensors: small, whatever the size of model and cluster."""

    format: Literal["qwen-edit-zero checkpoint"] = "qwen-edit-zero checkpoint"
    format_version: Literal[2] = 2
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


class ManifestFile(ManifestHead):
    """What `manifest.json` says: everything about a checkpoint but the numbers and where they lie."""

    tensors: tuple[TensorRecord, ...]


class Manifest(ManifestHead):
    """The same, joined with the table of ranges."""

    model_config = ConfigDict(arbitrary_types_allowed=True)

    tensors: tuple[SkipValidation[StoredTensor], ...]


_TENSORS_KEY = b',\n"tensors": [\n'  # raw line ends occur between members only: JSON strings escape them
_CHECKSUM_KEY = b',\n"manifest_xxh3_64": "'


def dump_manifest(manifest: ManifestFile) -> bytes:
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


def parse_manifest(content: bytes) -> ManifestFile:
    """The manifest in these bytes. Raises CheckpointError, which does not name the file."""
    manifest = _validate(ManifestFile, _checked_body(content))
    seen = set()
    for tensor in manifest.tensors:
        if (tensor.kind, tensor.name) in seen:
            raise CheckpointError(f"tensor {tensor.name} ({tensor.kind}) is listed twice")
        seen.add((tensor.kind, tensor.name))
        if tensor.dtype not in ITEM_SIZE:
            raise CheckpointError(f"tensor {tensor.name} ({tensor.kind}) has the unknown dtype {tensor.dtype}")
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
    if version and int(version[1]) < FORMAT_VERSION:
        raise CheckpointError(
            f"it has format version {int(version[1])}, of an early qwen-edit-zero; this one reads version "
            f"{FORMAT_VERSION} alone"
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


def load_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a checkpoint folder and its ranges. Raises CheckpointError naming the folder or the file."""
    file = _load(checkpoint, parse_manifest)
    path = checkpoint / RANGES
    try:
        return _join(file, path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from None
    except (CheckpointError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from None


def _join(manifest: ManifestFile, content: bytes) -> Manifest:
    """Give each tensor its rows of the table. Raises CheckpointError or ValueError if they cannot be right."""
    expected = next((f.xxh3_64 for f in manifest.files if f.name == RANGES), None)
    if xxhash.xxh3_64_hexdigest(content) != expected:
        raise CheckpointError("its checksum is not the one in the manifest, so it is damaged or of another save")
    table = RangeTable.of_columns(parse_columns(content)[1])
    if sum(record.ranges for record in manifest.tensors) != len(table.start):
        raise CheckpointError(f"it has {len(table.start)} rows, which is not what the manifest says")
    sizes = np.array([file.size for file in manifest.files], np.int64)
    tensors, first = [], 0
    for t in manifest.tensors:
        ranges = Ranges(table, first, t.ranges, element_count(t.shape))
        if fault := ranges.fault(ITEM_SIZE[t.dtype], sizes):
            raise CheckpointError(f"tensor {t.name} ({t.kind}): {fault}")
        tensors.append(StoredTensor(t.name, t.kind, t.shape, t.dtype, ranges))
        first += t.ranges
    head = {name: getattr(manifest, name) for name in ManifestHead.model_fields}
    return Manifest.model_construct(**head, tensors=tuple(tensors))


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
