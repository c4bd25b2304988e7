"""What a DeepSpeed JSON says about memory and traffic, with DeepSpeed's own defaults for what it leaves out."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen_edit_zero.errors import SettingsError


@dataclass(frozen=True)
class ZeroOptions:
    """Sizes are in elements, as in the JSON.

    Attributes:
        stage: 1, 2 or 3.
        reduce_bucket, allgather_bucket, prefetch_bucket: elements of a message.
        persistence_threshold, model_persistence_threshold: parameters smaller than the first stay gathered, up to the
            second of all of them together.
        max_live, max_reuse_distance: elements that may be gathered at once, and after how many a parameter is needed
            again for it not to be released.
        sub_group: elements of masters that are stepped at once.
        hpz: ranks of the group inside of which backward gathers; 1: all gather everywhere.
        offload_optimizer, offload_param: "cpu", "nvme", or None.
        pin_optimizer, pin_param: whether these lie in page-locked memory.
    """

    stage: int
    overlap: bool
    contiguous_gradients: bool
    round_robin: bool
    reduce_bucket: int
    allgather_bucket: int
    prefetch_bucket: int
    persistence_threshold: int
    model_persistence_threshold: int
    max_live: int
    max_reuse_distance: int
    sub_group: int
    hpz: int
    offload_optimizer: str | None
    pin_optimizer: bool
    offload_param: str | None
    pin_param: bool
    nvme_buffer_count: int = 0
    nvme_buffer_size: int = 0

    @classmethod
    def from_json(cls, config: Mapping[str, Any], world: int) -> ZeroOptions:
        """Read `zero_optimization`. Raises SettingsError if the stage is none of 1, 2, 3, or for hpZ groups that do
        not divide `world`."""
        zero = config.get("zero_optimization") or {}
        stage = zero.get("stage", 0)
        if stage not in (1, 2, 3):
            raise SettingsError(
                f"zero_optimization.stage is {stage!r} in the DeepSpeed configuration, but this engine is for ZeRO "
                f"stages 1, 2 and 3. Set one of them, or use engine.backend=ddp for training without sharding."
            )
        hpz = int(zero.get("zero_hpz_partition_size", 1))
        if world % hpz:
            raise SettingsError(
                f"zero_hpz_partition_size is {hpz}, which does not divide the {world} ranks of this run"
            )

        def size(key: str, default: float) -> int:
            return int(zero.get(key, default))

        optimizer, param = (_offload(zero, name) for name in ("offload_optimizer", "offload_param"))
        on_nvme = zero.get("offload_param") or {}
        return cls(
            stage=stage,
            overlap=bool(zero.get("overlap_comm", stage == 3)),
            contiguous_gradients=bool(zero.get("contiguous_gradients", True)),
            round_robin=bool(zero.get("round_robin_gradients", False)),
            reduce_bucket=size("reduce_bucket_size", 5e8),
            allgather_bucket=size("allgather_bucket_size", 5e8),
            prefetch_bucket=size("stage3_prefetch_bucket_size", 5e7),
            persistence_threshold=size("stage3_param_persistence_threshold", 1e5),
            model_persistence_threshold=size("stage3_model_persistence_threshold", sys.maxsize),
            max_live=size("stage3_max_live_parameters", 1e9),
            max_reuse_distance=size("stage3_max_reuse_distance", 1e9),
            sub_group=size("sub_group_size", 1e9),
            hpz=hpz,
            offload_optimizer=optimizer[0],
            pin_optimizer=optimizer[1],
            offload_param=param[0] if stage == 3 else None,
            pin_param=param[1],
            nvme_buffer_count=int(on_nvme.get("buffer_count", 5)),
            nvme_buffer_size=int(on_nvme.get("buffer_size", 1e8)),
        )


def _offload(zero: Mapping[str, Any], name: str) -> tuple[str | None, bool]:
    section = zero.get(name) or {}
    device = section.get("device", "none")
    return (None if device in (None, "none") else str(device)), bool(section.get("pin_memory", False))
