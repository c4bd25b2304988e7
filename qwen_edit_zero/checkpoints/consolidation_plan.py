"""Which tensors a transformer consolidated from our own format has, and where each comes from; all checks first."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import numpy as np

from qwen_edit_zero.checkpoints.base_model import BaseModel, BaseTensor, transformer_tensors
from qwen_edit_zero.checkpoints.consolidation_output import PART, WINDOW, OutputTensor, Part, cut
from qwen_edit_zero.checkpoints.disk import OpenFiles
from qwen_edit_zero.checkpoints.manifest import LoraReference
from qwen_edit_zero.checkpoints.precision import (
    Bytes,
    Floats,
    convert,
    from_float32,
    output_dtype,
    to_float32,
)
from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.errors import CheckpointError, ModelFolderError
from qwen_edit_zero.flat_state import FROZEN, PARAM
from qwen_edit_zero.safetensors_file import ITEM_SIZE

_LORA_A, _LORA_B = ".lora_A.default.weight", ".lora_B.default.weight"


class FilesOfThreads:
    """Open files for each thread, since OpenFiles may not be shared."""

    def __init__(self) -> None:
        self._local = threading.local()
        self._opened: list[OpenFiles] = []

    def get(self) -> OpenFiles:
        """This thread's."""
        if not hasattr(self._local, "files"):
            self._local.files = OpenFiles()
            self._opened.append(self._local.files)
        files: OpenFiles = self._local.files
        return files

    def close(self) -> None:
        """Close what all threads opened; they must be done."""
        while self._opened:
            self._opened.pop().close()


class Sources:
    """What the parts read from: a reader of the checkpoint for each thread, and files of the base model."""

    def __init__(self, reader: CheckpointReader) -> None:
        self.files = FilesOfThreads()
        self._reader = reader
        self._local = threading.local()
        self._opened: list[CheckpointReader] = []

    @property
    def reader(self) -> CheckpointReader:
        """This thread's reader of the checkpoint."""
        if not hasattr(self._local, "reader"):
            self._local.reader = self._reader.another()
            self._opened.append(self._local.reader)
        reader: CheckpointReader = self._local.reader
        return reader

    def close(self) -> None:
        """Close what all threads opened; they must be done."""
        self.files.close()
        while self._opened:
            self._opened.pop().close()


def plan_tensors(
    reader: CheckpointReader, base: BaseModel | None, dtype: str, sources: Sources, *, kind: str = PARAM
) -> list[OutputTensor]:
    """Every parameter of the transformer, in the order of the base model's files.

    Trained ones come from the checkpoint, frozen ones from it, too, if it has them, else from the base model; adapters
    are merged into what they adapt. `kind` chooses between the weights and their running average (`ema`).
    Raises CheckpointError if the base model is another one than was trained from, or if the parameters of checkpoint
    and model are not the same set with the same shapes.
    """
    reference = reader.manifest.model
    if base is not None:
        _check_base(reader, base)
    require_kind(reader, kind)
    trained = {name: reader.shape(name, kind) for name in reader.names(kind)}
    adapters = {name for name in trained if name.endswith((_LORA_A, _LORA_B))} if reference.lora else set()
    frozen = {name.replace(".base_layer.", ".") if reference.lora else name: name for name in reference.frozen}
    whole = {name: shape for name, shape in trained.items() if name not in adapters}
    stored = _stored_tensors(reader, kind, whole, frozen)
    expected: Mapping[str, _Stored | BaseTensor] = stored
    if base is not None and "transformer" in base.shards:
        expected = base.shards["transformer"].tensors
    _check_names(reader, set(expected), set(whole), set(frozen))
    for name, tensor in stored.items():
        if tensor.shape != tuple(expected[name].shape):
            assert base is not None
            raise CheckpointError(
                f"{reader.path}: {name} has shape {list(tensor.shape)}, but {list(expected[name].shape)} in {base.path}"
            )
    merged = _pair_adapters(reader, kind, adapters, {name: tuple(t.shape) for name, t in expected.items()})
    outputs = []
    for name, there in expected.items():
        found = stored.get(name, there)
        target = output_dtype(found.dtype, dtype)
        shape, count = tuple(found.shape), prod(found.shape)
        if name in merged:
            assert reference.lora is not None
            merge = _Merge(sources, merged[name], kind, reference.lora, found, target)
            # What is in the checkpoint is one part, so that every stored range is compared with its checksum.
            most = count if isinstance(found, _Stored) else max(1, PART // shape[1]) * shape[1]
            parts = [Part(s, n, partial(merge.windows, s, n)) for s, n in cut(count, most)]
        elif isinstance(found, _Stored):
            parts = [Part(0, count, _from_checkpoint(sources, found, target))] if count else []
        else:
            parts = parts_of_base(found, target, sources.files.get)
        outputs.append(OutputTensor(name, shape, target, parts))
    return outputs


@dataclass(frozen=True)
class _Stored:
    """A tensor of the checkpoint, under the name and kind that it has there."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]


def _stored_tensors(
    reader: CheckpointReader, kind: str, whole: Mapping[str, tuple[int, ...]], frozen: Mapping[str, str]
) -> dict[str, _Stored]:
    """What the checkpoint has of the model's parameters, by their names there. Raises CheckpointError."""
    found = {name: _Stored(name, kind, reader.dtype(name, kind), shape) for name, shape in whole.items()}
    if not reader.manifest.model.frozen_stored:
        return found
    held = set(reader.names(FROZEN))
    if held != set(frozen.values()):
        odd = sorted(held ^ set(frozen.values()))
        raise CheckpointError(
            f"{reader.path} says that it has all frozen parameters, but not so of {', '.join(odd[:5])}"
        )
    for name, there in frozen.items():
        if name not in found:  # else the names do not fit, which is told
            found[name] = _Stored(there, FROZEN, reader.dtype(there, FROZEN), reader.shape(there, FROZEN))
    return found


def _check_base(reader: CheckpointReader, base: BaseModel) -> None:
    """Raise CheckpointError if this is not the model that was trained from, as far as its files tell."""
    reference = reader.manifest.model
    if "transformer" not in base.shards:
        if not reference.all_stored:
            transformer_tensors(base)  # raises
        if dict(base.transformer_config) != reference.config:
            raise CheckpointError(
                f"{reader.path} was trained from another model than {base.path}, whose transformer/config.json "
                "differs. Give the folder it was trained from as base model"
            )
    elif base.fingerprint != reference.fingerprint:
        raise CheckpointError(
            f"{reader.path} was trained from another model than {base.path} (trained from: {reference.path}, "
            f"fingerprint {reference.fingerprint}; here: {base.fingerprint}). "
            "Give the folder it was trained from as base model"
        )


def require_kind(reader: CheckpointReader, kind: str) -> None:
    """Raise CheckpointError if averaged weights are asked for and there are none."""
    if kind != PARAM and kind not in reader.kinds():
        raise CheckpointError(
            f"{reader.path} holds no averaged weights: its run had no EMA. Leave out --weights {kind}"
        )


def _check_names(reader: CheckpointReader, expected: set[str], whole: set[str], frozen: set[str]) -> None:
    for fault, names in (
        ("are neither in the checkpoint nor recorded as frozen", expected - whole - frozen),
        ("are in the checkpoint although recorded as frozen", whole & frozen),
        ("are not parameters of the base model's transformer", (whole | frozen) - expected),
    ):
        if names:
            shown = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise CheckpointError(f"{reader.path} does not fit its model: {shown} {fault}")


def _pair_adapters(
    reader: CheckpointReader, kind: str, adapters: set[str], expected: Mapping[str, tuple[int, ...]]
) -> dict[str, str]:
    """Weight name -> module name of every adapter, after checking both halves and their shapes."""
    modules = {name.removesuffix(_LORA_A).removesuffix(_LORA_B) for name in adapters}
    pairs = {}
    for module in sorted(modules):
        weight = f"{module}.weight"
        missing = {module + _LORA_A, module + _LORA_B} - adapters
        if missing:
            raise CheckpointError(f"{reader.path}: {missing.pop()} is not there, but its other half is")
        shape = expected.get(weight)
        a, b = reader.shape(module + _LORA_A, kind), reader.shape(module + _LORA_B, kind)
        if shape is None or len(shape) != 2 or (b[0], a[1]) != shape or a[0] != b[1]:
            fit = "not in the model" if shape is None else f"of shape {list(shape)}"
            raise CheckpointError(f"{reader.path}: adapter {module} (B {list(b)}, A {list(a)}): {weight} is {fit}")
        pairs[weight] = module
    return pairs


def _from_checkpoint(sources: Sources, stored: _Stored, target: str) -> Callable[[], Iterator[Bytes]]:
    def windows() -> Iterator[Bytes]:
        for window in sources.reader.stream(stored.name, stored.kind, chunk_bytes=WINDOW):
            yield convert(window, stored.dtype, target)

    return windows


def parts_of_base(tensor: BaseTensor, target: str, files: Callable[[], OpenFiles]) -> list[Part]:
    """A tensor of the base model as it is, but for its type. `files` gives the calling thread's open files."""

    def windows(start: int, length: int) -> Callable[[], Iterator[Bytes]]:
        def read() -> Iterator[Bytes]:
            for data in _base_bytes(tensor, start, length, files()):
                yield convert(data, tensor.dtype, target)

        return read

    return [Part(start, length, windows(start, length)) for start, length in cut(prod(tensor.shape))]


def _base_bytes(tensor: BaseTensor, start: int, length: int, files: OpenFiles) -> Iterator[Bytes]:
    item = ITEM_SIZE[tensor.dtype]
    first, end = tensor.offset + start * item, tensor.offset + (start + length) * item
    buffer = np.empty(min(WINDOW, end - first), dtype=np.uint8)
    for position in range(first, end, WINDOW):
        data = buffer[: min(WINDOW, end - position)]
        try:
            files.read_into(tensor.path, position, data.data)
        except OSError as error:
            raise ModelFolderError(f"cannot read {tensor.path}: {error.strerror}") from None
        yield data


@dataclass(frozen=True)
class _Merge:
    """W + alpha / rank * B A (https://arxiv.org/abs/2106.09685, section 4.1), some elements of W at a time, in fp32."""

    sources: Sources
    module: str
    kind: str
    lora: LoraReference
    tensor: _Stored | BaseTensor
    target: str

    def windows(self, start: int, length: int) -> Iterator[Bytes]:
        """Elements `start .. start + length`, which are whole rows."""
        reader, columns = self.sources.reader, self.tensor.shape[1]
        a = _rows(reader, self.module + _LORA_A, self.kind, 0, reader.shape(self.module + _LORA_A, self.kind)[0])
        b = _rows(reader, self.module + _LORA_B, self.kind, start // columns, length // columns)
        b *= np.float32(self.lora.alpha / self.lora.rank)
        if isinstance(self.tensor, _Stored):
            data = reader.stream(self.tensor.name, self.tensor.kind, chunk_bytes=WINDOW)
        else:
            data = _base_bytes(self.tensor, start, length, self.sources.files.get())
        done = 0
        for window in data:
            weight = to_float32(window, self.tensor.dtype)
            first, end = done // columns, -(-(done + len(weight)) // columns)
            skip = done - first * columns
            weight += (b[first:end] @ a).reshape(-1)[skip : skip + len(weight)]
            done += len(weight)
            yield from_float32(weight, self.target)


def _rows(reader: CheckpointReader, name: str, kind: str, first: int, count: int) -> Floats:
    columns = reader.shape(name, kind)[1]
    data = reader.read_bytes(name, first * columns, count * columns, kind)
    return to_float32(data, reader.dtype(name, kind)).reshape(count, columns)
