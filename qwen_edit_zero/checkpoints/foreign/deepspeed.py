"""DeepSpeed's own checkpoints, ZeRO-1, 2 and 3, as a ForeignState.

ZeRO-1 and 2 lay the parameters of an optimizer group end to end, pad the result to a multiple of the number of ranks
and cut it into equal partitions. ZeRO-3 cuts every parameter into equal parts, the last padded, and lays a rank's parts
end to end, in sub-groups. (deepspeed/runtime/zero/stage_1_and_2.py, stage3.py; deepspeed/utils/zero_to_fp32.py.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qwen_edit_zero.checkpoints.foreign.blocks import Block, Shape, cover_fault, flat_block
from qwen_edit_zero.checkpoints.foreign.deepspeed_compare import compare_with_model
from qwen_edit_zero.checkpoints.foreign.deepspeed_folder import DeepSpeedFiles, find_tag, open_files
from qwen_edit_zero.checkpoints.foreign.deepspeed_optimizer import RankState, read_rank_states
from qwen_edit_zero.checkpoints.foreign.pickles import PickledTensor
from qwen_edit_zero.checkpoints.foreign.reading import BlockReader
from qwen_edit_zero.checkpoints.foreign.source import ForeignGroup, ForeignState, ForeignTensor
from qwen_edit_zero.checkpoints.foreign.torch_files import TorchFile
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.flat_state import PARAM
from qwen_edit_zero.safetensors_file import element_count

Placed = tuple[str, Shape, int]  # a parameter, its shape, and its first element in what the group's ranks hold


def open_deepspeed(path: Path) -> ForeignState:
    """Describe a DeepSpeed checkpoint folder, or the newest tag of a folder of them.

    Raises CheckpointError naming rank, file and tensor if a file is missing, of another save, damaged or too many, or
    if the parts do not cover every element exactly once.
    """
    files = open_files(find_tag(path))
    model = files.model
    reader = BlockReader()
    try:
        ranks = read_rank_states(files, reader)
    finally:
        reader.close()
    state = ForeignState(
        path=files.tag,
        format=f"DeepSpeed {files.version}, ZeRO-{files.stage}",
        world_size=files.world_size,
        step=_count(model.get("global_steps")),
        optimizer_steps=ranks[0].steps,
        samples_seen=_count(model.get("global_samples")),
        loss_scale=ranks[0].loss_scale,
        tied={str(k): str(v) for k, v in dict(model.get("shared_params") or {}).items()},
        files=tuple(f.path for f in (*files.models, *files.optims)),
    )
    shapes = [{str(n): tuple(s) for n, s in group.items()} for group in model["param_shapes"]]
    state.groups = _groups(ranks[0], shapes)
    if files.stage == 3:
        _add_partitioned(state, files, ranks, shapes)
    else:
        _add_flattened(state, files, ranks, shapes)
    _add_frozen(state, files)
    _add_buffers(state, files)
    _note_the_unsaid(state, files)
    return state


def _groups(rank: RankState, shapes: Sequence[Mapping[str, Shape]]) -> tuple[ForeignGroup, ...]:
    """Flat tensors with the same options are one group. The shapes are told flat tensor by flat tensor."""
    if len(rank.options) != len(shapes):
        return ()
    found: dict[tuple[float, float], list[str]] = {}
    for options, names in zip(rank.options, shapes, strict=True):
        found.setdefault(options, []).extend(names)
    return tuple(ForeignGroup(decay, lr, tuple(names)) for (decay, lr), names in found.items())


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _add_flattened(
    state: ForeignState, files: DeepSpeedFiles, ranks: Sequence[RankState], shapes: Sequence[Mapping[str, Shape]]
) -> None:
    """ZeRO-1 and 2."""
    for rank in ranks:
        if len(rank.flats) != len(shapes):
            raise CheckpointError(f"{rank.file.path} holds {len(rank.flats)} groups, but the model has {len(shapes)}")
    paddings = files.optimizer(0).get("param_alignment_paddings")
    for number, group in enumerate(shapes):
        placed = list(_end_to_end(group, paddings[number] if paddings else None, files))
        needed = placed[-1][2] + element_count(placed[-1][1]) if placed else 0
        size = ranks[0].flats[number].shape[0]  # of every rank's partition; the last may have lost its padding
        _check_partitions(files, ranks, number, size, needed)
        for kind in (PARAM, *ranks[0].kinds):
            for name, shape, first in placed:
                blocks = []
                for index in range(first // size if size else 0, files.world_size):
                    low, high = max(first, index * size), min(first + element_count(shape), (index + 1) * size)
                    if low >= high:
                        break
                    flat = ranks[index].tensors(kind)[number]
                    stored = ranks[index].file.storage_of(flat, f"{name} ({kind})")
                    blocks.append(flat_block(stored, flat.first + low - index * size, low - first, high - low))
                _add(state, name, kind, ranks[0].tensors(kind)[number].dtype, shape, blocks)
        _check_mappings(files, number, placed, size)
    compare_with_model(state, files)


def _end_to_end(group: Mapping[str, Shape], paddings: Any, files: DeepSpeedFiles) -> Iterator[Placed]:
    if paddings is not None and len(paddings) != len(group):
        raise CheckpointError(f"{files.optims[0].path} has paddings of {len(paddings)} parameters for {len(group)}")
    position = 0
    for index, (name, shape) in enumerate(group.items()):
        yield name, shape, position
        position += element_count(shape) + (paddings[index] if paddings else 0)


def _check_partitions(files: DeepSpeedFiles, ranks: Sequence[RankState], number: int, size: int, needed: int) -> None:
    last = len(ranks) - 1
    for index, rank in enumerate(ranks):
        for kind in (PARAM, *ranks[0].kinds):
            found = rank.tensors(kind)[number].shape[0]
            if found != size and not (index == last and found < size):
                raise CheckpointError(
                    f"{rank.file.path} (rank {index}) holds {found} elements ({kind}) of group {number}, but rank 0 "
                    f"{size}: the files are of different saves"
                )
            if needed > index * size and found < min(size, needed - index * size):
                raise CheckpointError(
                    f"{rank.file.path} (rank {index}) holds {found} elements ({kind}) of group {number}, but its share "
                    f"of {needed} is {min(size, needed - index * size)}: files and shapes are of different saves"
                )
    if size * len(ranks) - needed >= max(256, 16 * len(ranks)) or size * len(ranks) < needed:
        raise CheckpointError(
            f"{files.tag}: the ranks together hold {size * len(ranks)} elements of group {number}, but its parameters "
            f"have {needed}: files and shapes are of different saves"
        )


def _check_mappings(files: DeepSpeedFiles, number: int, placed: Sequence[Placed], size: int) -> None:
    """DeepSpeed also notes where each parameter begins in a rank's partition: compare.

    With `round_robin_gradients` these notes are of an order that the partitions do not have (DeepSpeed 0.19.8 computes
    them from the groups as they were before they were reordered); the shapes have the right one.
    """
    config = files.optims[0].value.get("ds_config")
    zero = config.get("zero_optimization") if isinstance(config, Mapping) else None
    if not isinstance(zero, Mapping) or zero.get("round_robin_gradients"):
        return
    for rank, file in enumerate(files.optims):
        mappings = files.optimizer(rank).get("param_slice_mappings")
        if not mappings:
            continue
        for name, shape, first in placed:
            noted = mappings[number].get(name)
            low, high = max(first, rank * size), min(first + element_count(shape), (rank + 1) * size)
            found = (noted.get("start"), noted.get("numel")) if noted is not None else None
            if found != ((low - rank * size, high - low) if low < high else None):
                raise CheckpointError(
                    f"{file.path} (rank {rank}) says that its part of {name} is at {found}, which the shapes in "
                    f"{files.models[0].path.name} contradict: the files are of different saves"
                )


def _add_partitioned(
    state: ForeignState, files: DeepSpeedFiles, ranks: Sequence[RankState], shapes: Sequence[Mapping[str, Shape]]
) -> None:
    """ZeRO-3."""
    world = files.world_size
    if any(files.optimizer(r).get("ds_zero_partition_groups") for r in range(world)):
        raise CheckpointError(f"{files.tag} holds experts partitioned over groups of ranks, which is not read here")
    parameters = {name: shape for group in shapes for name, shape in group.items()}
    needed = sum(-(-element_count(s) // world) for s in parameters.values())
    for index, rank in enumerate(ranks):
        for kind in (PARAM, *ranks[0].kinds):
            sizes = [t.shape[0] for t in rank.tensors(kind)]
            if sum(sizes) != needed or sizes != [t.shape[0] for t in ranks[0].flats]:
                raise CheckpointError(
                    f"{rank.file.path} (rank {index}) holds {sum(sizes)} elements ({kind}) in {len(sizes)} sub-groups, "
                    f"but its share of the parameters is {needed}: files and shapes are of different saves"
                )
    bounds = np.concatenate([[0], np.cumsum([t.shape[0] for t in ranks[0].flats])]).tolist()
    for kind in (PARAM, *ranks[0].kinds):
        position = 0
        for name, shape in parameters.items():
            count = element_count(shape)
            part = -(-count // world)
            blocks = []
            for index, held in enumerate(ranks):
                length = min(part, count - index * part)
                for number, low, high in _sub_groups(bounds, position, position + max(0, length)):
                    flat = held.tensors(kind)[number]
                    stored = held.file.storage_of(flat, f"{name} ({kind})")
                    start = index * part + low - position
                    blocks.append(flat_block(stored, flat.first + low - bounds[number], start, high - low))
            _add(state, name, kind, ranks[0].tensors(kind)[0].dtype, shape, blocks)
            position += part


def _sub_groups(bounds: Sequence[int], low: int, high: int) -> Iterator[tuple[int, int, int]]:
    """The sub-groups that hold elements `low .. high` of a rank, and which of these each holds."""
    number = int(np.searchsorted(bounds, low, side="right")) - 1
    while low < high:
        end = min(high, bounds[number + 1])
        if low < end:
            yield number, low, end
        low, number = end, number + 1


def _add_frozen(state: ForeignState, files: DeepSpeedFiles) -> None:
    model = files.model
    fragments, shapes = model.get("frozen_param_fragments"), model.get("frozen_param_shapes")
    if not fragments or not shapes:  # ZeRO-1 keeps them among the model's weights alone
        known = {name for _, name in state.tensors} | set(state.tied) | set(model["buffer_names"] or ())
        for name, tensor in (model["module"] or {}).items():
            if name not in known and isinstance(tensor, PickledTensor) and (files.stage < 3 or 0 not in tensor.shape):
                _add_whole(state, files.models[0], name, tensor, "frozen")
        return
    for name, shape in shapes.items():
        shape, count = tuple(shape), element_count(shape)
        if files.stage < 3:
            tensor = fragments.get(name)
            if tensor is None or tensor.shape != shape:
                raise CheckpointError(
                    f"{files.models[0].path}: the frozen {name} is not there in its shape {list(shape)}"
                )
            _add_whole(state, files.models[0], name, tensor, "frozen")
            continue
        part, blocks = -(-count // files.world_size), []
        for rank, file in enumerate(files.models):
            tensor = (file.value.get("frozen_param_fragments") or {}).get(name)
            length = max(0, min(part, count - rank * part))
            if tensor is None or element_count(tensor.shape) < length:
                raise CheckpointError(
                    f"{file.path} (rank {rank}) does not hold its {length} elements of the frozen {name}"
                )
            stored = file.storage_of(tensor, name)
            blocks.append(flat_block(stored, tensor.first, rank * part, length))
        _add(state, name, PARAM, tensor.dtype, shape, blocks, "frozen")


def _add_buffers(state: ForeignState, files: DeepSpeedFiles) -> None:
    for name in files.model["buffer_names"] or ():
        tensor = (files.model["module"] or {}).get(name)
        if isinstance(tensor, PickledTensor):
            _add_whole(state, files.models[0], name, tensor, "buffer")


def _add_whole(state: ForeignState, file: TorchFile, name: str, tensor: PickledTensor, role: str) -> None:
    block = Block(file.storage_of(tensor, name), tensor.first, (0,) * len(tensor.shape), tensor.shape, tensor.strides)
    if (PARAM, name) not in state.tensors:
        state.add(ForeignTensor(name, PARAM, tensor.dtype, tensor.shape, tensor.shape, lambda: (block,), role))


def _add(
    state: ForeignState, name: str, kind: str, dtype: str, shape: Shape, blocks: list[Block], role: str = "trained"
) -> None:
    view = (element_count(shape),)
    if fault := cover_fault(blocks, view):
        files = ", ".join(sorted({b.stored.path.name for b in blocks}))
        raise CheckpointError(f"{state.path}: {name} ({kind}) of shape {list(shape)}, in {files or 'no file'}: {fault}")
    state.add(ForeignTensor(name, kind, dtype, shape, view, lambda: blocks, role))


def _note_the_unsaid(state: ForeignState, files: DeepSpeedFiles) -> None:
    known = {name for _, name in state.tensors} | set(state.tied)
    unknown = [str(name) for name in (files.model["module"] or {}) if name not in known]
    if unknown:
        state.notes.append(
            f"DeepSpeed lists {', '.join(unknown[:5])}{' and more' if len(unknown) > 5 else ''} without saying which "
            "parameter it shares its values with; it is left out"
        )
