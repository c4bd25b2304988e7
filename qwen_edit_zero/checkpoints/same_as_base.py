"""Are the frozen parameters of another program's checkpoint those of the base model? Every element, as a stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod

import numpy as np

from qwen_edit_zero.checkpoints.base_model import BaseTensor
from qwen_edit_zero.checkpoints.disk import OpenFiles
from qwen_edit_zero.checkpoints.foreign.source import ForeignSource
from qwen_edit_zero.checkpoints.precision import FLOATS, Bytes, OverflowingValue, convert
from qwen_edit_zero.errors import CheckpointError, ModelFolderError
from qwen_edit_zero.safetensors_file import ITEM_SIZE

_WINDOW = 2**20  # elements compared at a time


def frozen_bytes(source: ForeignSource, frozen: Mapping[str, str]) -> int:
    """Bytes of the source that `compare_frozen` reads."""
    return sum(source.tensor(was).size for was in frozen.values())


def compare_frozen(
    source: ForeignSource,
    frozen: Mapping[str, str],
    base: Mapping[str, BaseTensor],
    passed: Callable[[int], None],
) -> None:
    """Raise CheckpointError unless every frozen parameter is what the base model has, as far as its type can tell.

    Where one of the two is stored in fewer bits, the other is rounded to it.

    Args:
        frozen: name in the base model -> name in the source.
        base: the base model's tensors by name.
        passed: told the bytes of the source that were compared.
    """
    files = OpenFiles()
    try:
        for name, was in frozen.items():
            _compare(source, was, name, base[name], files, passed)
    finally:
        files.close()


def _compare(
    source: ForeignSource, was: str, name: str, tensor: BaseTensor, files: OpenFiles, passed: Callable[[int], None]
) -> None:
    stored, item = source.dtype(was), ITEM_SIZE[tensor.dtype]
    done = 0
    for theirs in source.stream(was, 0, prod(tensor.shape), window=_WINDOW * ITEM_SIZE[stored]):
        count = len(theirs) // ITEM_SIZE[stored]
        ours = np.empty(count * item, dtype=np.uint8)
        try:
            files.read_into(tensor.path, tensor.offset + done * item, ours.data)
        except OSError as error:
            raise ModelFolderError(f"cannot read {tensor.path}: {error.strerror}") from None
        if (element := _first_difference(theirs, stored, ours, tensor.dtype)) is not None:
            raise CheckpointError(
                f"{source.path}: {was} did not train, but is not what {name} is in {tensor.path}, at or after element "
                f"{done + element}: another base model was trained from"
            )
        done += count
        passed(len(theirs))


def _first_difference(theirs: Bytes, stored: str, ours: Bytes, dtype: str) -> int | None:
    if stored != dtype and not {stored, dtype} <= FLOATS:
        return 0
    size = min(ITEM_SIZE[stored], ITEM_SIZE[dtype])
    try:
        if ITEM_SIZE[stored] < ITEM_SIZE[dtype]:
            ours = convert(ours, dtype, stored)
        else:
            theirs = convert(theirs, stored, dtype)
    except OverflowingValue:
        return 0
    differing = np.flatnonzero(theirs != ours)
    return None if len(differing) == 0 else int(differing[0]) // size
