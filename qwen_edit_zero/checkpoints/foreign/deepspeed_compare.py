"""Are the fp32 partitions of the ranks of the same save as the model's file, where nothing in the files says so?"""

from __future__ import annotations

import numpy as np

from qwen_edit_zero.checkpoints.foreign.blocks import Block
from qwen_edit_zero.checkpoints.foreign.deepspeed_folder import DeepSpeedFiles
from qwen_edit_zero.checkpoints.foreign.pickles import PickledTensor
from qwen_edit_zero.checkpoints.foreign.reading import BlockReader
from qwen_edit_zero.checkpoints.foreign.source import ForeignState
from qwen_edit_zero.checkpoints.foreign.torch_files import TorchFile, is_contiguous
from qwen_edit_zero.checkpoints.precision import FLOATS, OverflowingValue, convert, to_float32
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.flat_state import PARAM
from qwen_edit_zero.safetensors_file import ITEM_SIZE

_SAMPLE = 4096  # elements of each block


def compare_with_model(state: ForeignState, files: DeepSpeedFiles) -> None:
    """The model's file of ZeRO-1 and 2 also has the weights, as DeepSpeed rounds the fp32 ones after every step.

    So a sample of every rank's part of every parameter must round to what is there. Raises CheckpointError naming
    rank, file and tensor.
    """
    model, reader = files.models[0], BlockReader()
    ranks = {file.path: rank for rank, file in enumerate(files.optims)}
    try:
        for name, weight in (model.value["module"] or {}).items():
            tensor = state.tensors.get((PARAM, name))
            if tensor is None or tensor.role != "trained" or not isinstance(weight, PickledTensor):
                continue
            if weight.shape != tensor.shape:
                raise CheckpointError(
                    f"{model.path}: {name} has shape {list(weight.shape)} among the weights, but "
                    f"{list(tensor.shape)} among the shapes of what was trained"
                )
            if not is_contiguous(weight) or not {weight.dtype, tensor.dtype} <= FLOATS:
                continue
            for block in tensor.blocks:
                if not _agree(block, tensor.dtype, model, weight, name, reader):
                    raise CheckpointError(
                        f"{block.stored.path} (rank {ranks[block.stored.path]}) is not of the same save as "
                        f"{model.path.name}: its part of {name} does not round to the weights there. Was the run "
                        "interrupted while it saved, or were weights changed outside the optimizer?"
                    )
    finally:
        reader.close()


def _agree(block: Block, dtype: str, model: TorchFile, weight: PickledTensor, name: str, reader: BlockReader) -> bool:
    count = min(block.count, _SAMPLE)
    skip = (block.count - count) // 2
    item = ITEM_SIZE[dtype]
    ours = reader.peek(block.stored, (block.first + skip) * item, count * item)
    item = ITEM_SIZE[weight.dtype]
    place = (weight.first + block.corner[0] + skip) * item
    theirs = to_float32(reader.peek(model.storage_of(weight, name), place, count * item), weight.dtype)
    try:
        rounded = to_float32(convert(ours, dtype, weight.dtype), weight.dtype)
    except OverflowingValue:
        return False
    return bool(np.array_equal(rounded, theirs, equal_nan=True))
