"""Which tensors a consolidated transformer has, and where each comes from; all checks before a byte is written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from qwen_edit_zero.checkpoints.base_model import BaseModel, BaseTensor
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
from qwen_edit_zero.checkpoints.safetensors_file import ITEM_SIZE
from qwen_edit_zero.errors import CheckpointError, ModelFolderError

CHUNK = 4 * 2**20  # bytes read at a time; small enough to stay in the processor's cache while it is converted
_LORA_A, _LORA_B = ".lora_A.default.weight", ".lora_B.default.weight"


@dataclass(frozen=True)
class OutputTensor:
    """A tensor to write: `chunks()` gives its bytes in order, already in `dtype`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    chunks: Callable[[], Iterator[Bytes]]

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * ITEM_SIZE[self.dtype]


def plan_tensors(reader: CheckpointReader, base: BaseModel, dtype: str, files: OpenFiles) -> list[OutputTensor]:
    """Every parameter of the transformer, in the order of the base model's files.

    Trained ones come from the checkpoint, frozen ones from the base model, adapters are merged into what they adapt.
    Raises CheckpointError if the base model is another one than was trained from, or if the parameters of checkpoint
    and model are not the same set with the same shapes.
    """
    reference = reader.manifest.model
    if base.fingerprint != reference.fingerprint:
        raise CheckpointError(
            f"{reader.path} was trained from another model than {base.path} (trained from: {reference.path}, "
            f"fingerprint {reference.fingerprint}; here: {base.fingerprint}). "
            "Give the folder it was trained from as base model"
        )
    expected = base.shards["transformer"].tensors
    trained = {name: reader.shape(name) for name in reader.names()}
    adapters = {name for name in trained if name.endswith((_LORA_A, _LORA_B))} if reference.lora else set()
    frozen = {name.replace(".base_layer.", ".") if reference.lora else name for name in reference.frozen}
    whole = {name: shape for name, shape in trained.items() if name not in adapters}
    _check_names(reader, set(expected), set(whole), frozen)
    for name, shape in whole.items():
        if shape != tuple(expected[name].shape):
            raise CheckpointError(
                f"{reader.path}: {name} has shape {list(shape)}, but {list(expected[name].shape)} in {base.path}"
            )
    merged = _pair_adapters(reader, adapters, expected)
    outputs = []
    for name, tensor in expected.items():
        stored = reader.dtype(name) if name in whole else tensor.dtype
        target = output_dtype(stored, dtype)
        if name in whole:
            chunks = _from_checkpoint(reader, name, stored, target)
        elif name in merged:
            assert reference.lora is not None
            chunks = _with_adapter(reader, merged[name], reference.lora, tensor, target, files)
        else:
            chunks = _from_base(tensor, target, files)
        outputs.append(OutputTensor(name, tuple(tensor.shape), target, chunks))
    return outputs


def _check_names(reader: CheckpointReader, expected: set[str], whole: set[str], frozen: set[str]) -> None:
    for fault, names in (
        ("are neither in the checkpoint nor recorded as frozen", expected - whole - frozen),
        ("are in the checkpoint although recorded as frozen", whole & frozen),
        ("are not parameters of the base model's transformer", (whole | frozen) - expected),
    ):
        if names:
            shown = ", ".join(sorted(names)[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
            raise CheckpointError(f"{reader.path} does not fit its model: {shown} {fault}")


def _pair_adapters(reader: CheckpointReader, adapters: set[str], expected: Mapping[str, BaseTensor]) -> dict[str, str]:
    """Weight name -> module name of every adapter, after checking both halves and their shapes."""
    modules = {name.removesuffix(_LORA_A).removesuffix(_LORA_B) for name in adapters}
    pairs = {}
    for module in sorted(modules):
        weight = f"{module}.weight"
        missing = {module + _LORA_A, module + _LORA_B} - adapters
        if missing:
            raise CheckpointError(f"{reader.path}: {missing.pop()} is not there, but its other half is")
        tensor = expected.get(weight)
        a, b = reader.shape(module + _LORA_A), reader.shape(module + _LORA_B)
        if tensor is None or len(tensor.shape) != 2 or (b[0], a[1]) != tuple(tensor.shape) or a[0] != b[1]:
            fit = "not in the base model" if tensor is None else f"of shape {list(tensor.shape)}"
            raise CheckpointError(f"{reader.path}: adapter {module} (B {list(b)}, A {list(a)}): {weight} is {fit}")
        pairs[weight] = module
    return pairs


def _from_checkpoint(reader: CheckpointReader, name: str, stored: str, target: str) -> Callable[[], Iterator[Bytes]]:
    def chunks() -> Iterator[Bytes]:
        for chunk in reader.stream(name, chunk_bytes=CHUNK):
            yield convert(chunk, stored, target)

    return chunks


def _from_base(tensor: BaseTensor, target: str, files: OpenFiles) -> Callable[[], Iterator[Bytes]]:
    def chunks() -> Iterator[Bytes]:
        for data in _base_bytes(tensor, CHUNK, files):
            yield convert(data, tensor.dtype, target)

    return chunks


def _base_bytes(tensor: BaseTensor, step: int, files: OpenFiles) -> Iterator[Bytes]:
    for done in range(0, tensor.nbytes, step):
        data = np.empty(min(step, tensor.nbytes - done), dtype=np.uint8)
        try:
            files.read_into(tensor.path, tensor.offset + done, data.data)
        except OSError as error:
            raise ModelFolderError(f"cannot read {tensor.path}: {error.strerror}") from None
        yield data


def _with_adapter(
    reader: CheckpointReader, module: str, lora: LoraReference, tensor: BaseTensor, target: str, files: OpenFiles
) -> Callable[[], Iterator[Bytes]]:
    """W + alpha / rank * B A (https://arxiv.org/abs/2106.09685, section 4.1), some rows of W at a time, in fp32."""

    def chunks() -> Iterator[Bytes]:
        a, b = _matrix(reader, module + _LORA_A), _matrix(reader, module + _LORA_B)
        b *= np.float32(lora.alpha / lora.rank)
        columns = tensor.shape[1]
        row_bytes = columns * ITEM_SIZE[tensor.dtype]
        rows = max(1, CHUNK // row_bytes)
        for i, data in enumerate(_base_bytes(tensor, rows * row_bytes, files)):
            weight = to_float32(data, tensor.dtype).reshape(-1, columns)
            weight += b[i * rows : (i + 1) * rows] @ a
            yield from_float32(weight.reshape(-1), target)

    return chunks


def _matrix(reader: CheckpointReader, name: str) -> Floats:
    shape = reader.shape(name)
    data = reader.read_bytes(name, 0, prod(shape))
    return to_float32(data, reader.dtype(name)).reshape(shape)
