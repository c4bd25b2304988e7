"""Which tensors are consolidated from a checkpoint of another program, and where each comes from; all checks first."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from math import prod

from qwen_edit_zero.checkpoints.base_model import BaseModel, transformer_tensors
from qwen_edit_zero.checkpoints.consolidation_output import WINDOW, OutputTensor, Part, cut
from qwen_edit_zero.checkpoints.consolidation_plan import parts_of_base
from qwen_edit_zero.checkpoints.disk import OpenFiles
from qwen_edit_zero.checkpoints.foreign.prefixes import resolve
from qwen_edit_zero.checkpoints.foreign.source import ForeignSource
from qwen_edit_zero.checkpoints.precision import Bytes, convert, output_dtype
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.flat_state import PARAM

_ADAPTER = ("lora_A", "lora_B")


def plan_foreign(
    source: ForeignSource,
    base: BaseModel | None,
    dtype: str,
    files: Callable[[], OpenFiles],
    *,
    fill: bool,
    say: Callable[[str], None],
) -> list[OutputTensor]:
    """Every tensor to write. Without a base model: all weights and buffers that the source has, under their own names.

    With one: exactly its transformer's, in its order; what the source holds besides is left out and named. `fill` takes
    what the source lacks from the base model. `files` gives the calling thread's open files of the base model.
    Raises CheckpointError if tensors are missing or of other shapes.
    """
    for note in source.state.notes:
        say(f"note: {note}")
    return _all(source, dtype, say) if base is None else _as_in(source, base, dtype, files, fill, say)


def _all(source: ForeignSource, dtype: str, say: Callable[[str], None]) -> list[OutputTensor]:
    renaming = resolve(source.names())
    for note in renaming.notes:
        say(note)
    if source.state.tied:
        pairs = ", ".join(f"{alias} = {name}" for alias, name in list(source.state.tied.items())[:5])
        say(f"shared tensors are written once: {pairs}")
    return [_output(source, stored, name, dtype) for stored, name in renaming.names.items()]


def _as_in(
    source: ForeignSource,
    base: BaseModel,
    dtype: str,
    files: Callable[[], OpenFiles],
    fill: bool,
    say: Callable[[str], None],
) -> list[OutputTensor]:
    expected = transformer_tensors(base)
    stored = list(source.names())
    if any(segment in name.split(".") for name in stored for segment in _ADAPTER):
        raise CheckpointError(
            f"{source.path} holds LoRA adapters, and neither DeepSpeed nor torch stores their alpha: load it in the "
            "program that wrote it and save the adapter there"
        )
    renaming = resolve([*stored, *source.state.tied], expected.keys())
    for note in renaming.notes:
        say(note)
    found = {name: source.state.tied.get(was, was) for was, name in renaming.names.items()}
    if renaming.left_out:
        shown = ", ".join(renaming.left_out[:5]) + (" ..." if len(renaming.left_out) > 5 else "")
        say(f"{len(renaming.left_out)} tensors are not of the transformer and left out: {shown}")
    missing = [name for name in expected if name not in found]
    if missing and not fill:
        shown = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise CheckpointError(
            f"{source.path} lacks {len(missing)} of the {len(expected)} parameters of {base.path}: {shown}. If they "
            "were frozen and left out when it was saved, use --fill to take them from there"
        )
    if missing:
        say(f"{len(missing)} parameters are taken from {base.path}")
    outputs = []
    for name, tensor in expected.items():
        if name not in found:
            target = output_dtype(tensor.dtype, dtype)
            outputs.append(OutputTensor(name, tuple(tensor.shape), target, parts_of_base(tensor, target, files)))
            continue
        if source.shape(found[name]) != tuple(tensor.shape):
            raise CheckpointError(
                f"{source.path}: {found[name]} has shape {list(source.shape(found[name]))}, but {name} "
                f"{list(tensor.shape)} in {base.path}"
            )
        outputs.append(_output(source, found[name], name, dtype))
    return outputs


def _output(source: ForeignSource, stored: str, name: str, dtype: str) -> OutputTensor:
    tensor = source.tensor(stored)
    target = output_dtype(tensor.dtype, dtype)
    parts = [
        Part(start, length, partial(_windows, source, stored, start, length, target), partial(source.revisit, stored))
        for start, length in cut(prod(tensor.shape))
    ]
    return OutputTensor(name, tensor.shape, target, parts)


def _windows(source: ForeignSource, name: str, start: int, length: int, target: str) -> Iterator[Bytes]:
    stored = source.dtype(name)
    for window in source.stream(name, start, length, PARAM, window=WINDOW):
        yield convert(window, stored, target)
