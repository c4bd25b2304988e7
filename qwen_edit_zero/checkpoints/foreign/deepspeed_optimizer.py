"""What each rank of a DeepSpeed checkpoint holds: flat fp32 weights, moments, and the counters of its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from qwen_edit_zero.checkpoints.foreign.deepspeed_folder import DeepSpeedFiles
from qwen_edit_zero.checkpoints.foreign.pickles import PickledTensor, Record
from qwen_edit_zero.checkpoints.foreign.reading import BlockReader
from qwen_edit_zero.checkpoints.foreign.torch_files import TorchFile, is_contiguous
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.flat_state import PARAM
from qwen_edit_zero.safetensors_file import ITEM_SIZE

_NUMPY = {"F32": np.float32, "F64": np.float64, "I64": np.int64, "I32": np.int32, "F16": np.float16}


@dataclass(frozen=True)
class RankState:
    """A rank's share: `flats` and each of `moments` have one flat tensor a group (ZeRO-3: a sub-group).

    `options` are weight decay and learning rate of each flat tensor; empty if they are not told.
    """

    file: TorchFile
    flats: tuple[PickledTensor, ...]
    moments: Mapping[str, tuple[PickledTensor, ...]] = field(default_factory=dict)
    steps: int | None = None
    loss_scale: float | None = None
    options: tuple[tuple[float, float], ...] = ()

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the moments."""
        return tuple(self.moments)

    def tensors(self, kind: str) -> tuple[PickledTensor, ...]:
        """The weights or one of the moments."""
        return self.flats if kind == PARAM else self.moments[kind]


def read_rank_states(files: DeepSpeedFiles, reader: BlockReader) -> list[RankState]:
    """Every rank's share, after checking that all ranks hold the same moments after the same number of steps.

    Raises CheckpointError naming rank and file.
    """
    states = [_read(files, rank, reader) for rank in range(files.world_size)]
    for rank, state in enumerate(states):
        if state.steps != states[0].steps:
            raise CheckpointError(
                f"{state.file.path} (rank {rank}) is of step {state.steps}, but {states[0].file.path.name} of step "
                f"{states[0].steps}: the files are of different saves"
            )
        if state.kinds != states[0].kinds:
            raise CheckpointError(
                f"{state.file.path} (rank {rank}) holds the moments {list(state.kinds)}, but "
                f"{states[0].file.path.name} {list(states[0].kinds)}"
            )
    return states


def _read(files: DeepSpeedFiles, rank: int, reader: BlockReader) -> RankState:
    file, saved = files.optims[rank], files.optimizer(rank)
    key = "fp32_flat_groups" if files.stage == 3 else "single_partition_of_fp32_groups"
    flats = saved.get(key)
    if not isinstance(flats, list) or not all(_is_flat(t) for t in flats):
        raise CheckpointError(
            f"{file.path} (rank {rank}) has no fp32 weights ({key}): it is no ZeRO-{files.stage} checkpoint, or they "
            "were offloaded to NVMe when it was saved, and are not in it"
        )
    inner = saved.get("optimizer_state_dict" if files.stage == 3 else "base_optimizer_state")
    moments, steps = _moments(file, rank, inner, len(flats), reader)
    return RankState(file, tuple(flats), moments, steps, _loss_scale(saved), _options(inner, len(flats)))


def _options(inner: Any, flats: int) -> tuple[tuple[float, float], ...]:
    groups = inner.get("param_groups") if isinstance(inner, Mapping) else None
    found = [
        (group.get("weight_decay"), group.get("lr"))
        for group in groups or ()
        for _ in group["params"]  # flat tensors, in their order
    ]
    told = all(isinstance(value, int | float) for pair in found for value in pair)
    return tuple((float(decay), float(lr)) for decay, lr in found) if told and len(found) == flats else ()


def _moments(
    file: TorchFile, rank: int, inner: Any, groups: int, reader: BlockReader
) -> tuple[dict[str, tuple[PickledTensor, ...]], int | None]:
    """The moments of all groups, by name, and the optimizer's step; nothing before the first step."""
    by_group: list[Mapping[str, Any]] = []
    steps: set[int] = set()
    if isinstance(inner, list):  # "elastic" checkpoints: one entry a group
        by_group = inner
    elif isinstance(inner, Mapping) and inner.get("state"):
        members = [index for group in inner["param_groups"] for index in group["params"]]
        by_group = [inner["state"].get(index, {}) for index in members]
        steps |= {_number(file, g["step"], reader) for g in inner["param_groups"] if "step" in g}
    if not any(by_group):
        return {}, None
    names = [name for name, value in by_group[0].items() if _is_flat(value)]
    if len(by_group) != groups or any(not _is_flat(g.get(name)) for g in by_group for name in names):
        raise CheckpointError(f"{file.path} (rank {rank}) holds moments of {len(by_group)} groups, but {groups} groups")
    steps |= {_number(file, group["step"], reader) for group in by_group if "step" in group}
    if len(steps) > 1:
        raise CheckpointError(
            f"{file.path} (rank {rank}): its optimizer groups are at different steps: {sorted(steps)}"
        )
    return {name: tuple(group[name] for group in by_group) for name in names}, next(iter(steps), None)


def _is_flat(value: Any) -> bool:
    return isinstance(value, PickledTensor) and len(value.shape) == 1 and is_contiguous(value)


def _number(file: TorchFile, value: Any, reader: BlockReader) -> int:
    if isinstance(value, PickledTensor):
        stored = file.storage_of(value, "step")
        item = ITEM_SIZE[value.dtype]
        value = reader.peek(stored, value.first * item, item).view(_NUMPY[value.dtype])[0]
    return int(value)


def _loss_scale(saved: Mapping[str, Any]) -> float | None:
    scaler = saved.get("loss_scaler")
    scale = scaler.get("cur_scale") if isinstance(scaler, Record) else None
    return float(scale) if isinstance(scale, int | float) and scale != 1 else None
