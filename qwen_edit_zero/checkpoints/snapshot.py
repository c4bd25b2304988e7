"""A copy of a rank's ranges in host memory, from which its file is written while training changes the originals."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from qwen_edit_zero.checkpoints.rank_file import RangeMaker, RankPlan, byte_parts, expect_ranges

SLAB_BYTES = 64 * 2**20  # a power of two: torch rounds pinned memory up to one


class HostSnapshot:
    """The data of a rank's file, laid out as in the file, in slabs of host memory that later snapshots use again.

    Args:
        pinned: use page-locked memory, to which GPUs copy several times faster; where the system gives no more of it,
            ordinary memory is used.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._slabs: list[torch.Tensor] = []

    @property
    def allocated(self) -> int:
        """Bytes of host memory held."""
        return len(self._slabs) * SLAB_BYTES

    def grows_by(self, plan: RankPlan) -> int:
        """Bytes of host memory that a snapshot for this plan would take in addition."""
        return max(0, _data_bytes(plan) - self.allocated)

    @torch.no_grad()
    def take(self, plan: RankPlan, make_ranges: RangeMaker) -> None:
        """Copy the ranges; what was held before is overwritten. Returns when the originals may change."""
        needed = _data_bytes(plan)
        while self.allocated < needed:
            self._slabs.append(self._new_slab())
        devices = set()
        for planned, item in expect_ranges(plan, make_ranges):
            position = planned.offset - len(plan.header)
            if item.values.is_cuda:
                devices.add(item.values.device)
            for part in byte_parts(item.values):
                self._copy(part, position)
                position += part.numel()
        for device in devices:
            torch.cuda.current_stream(device).synchronize()

    def chunks(self, plan: RankPlan) -> Iterator[Iterator[memoryview]]:
        """The bytes of each planned range in order, as views of the slabs."""
        ends = [p.offset for p in plan.ranges[1:]] + [plan.size]
        for planned, end in zip(plan.ranges, ends, strict=True):
            yield self._views(planned.offset - len(plan.header), end - planned.offset)

    def _new_slab(self) -> torch.Tensor:
        if self._pinned:
            try:
                return torch.empty(SLAB_BYTES, dtype=torch.uint8, pin_memory=True)
            except RuntimeError:  # a limit on locked memory
                self._pinned = False
        return torch.empty(SLAB_BYTES, dtype=torch.uint8)

    def _stretches(self, position: int, length: int) -> Iterator[torch.Tensor]:
        end = position + length
        while position < end:
            index, begin = divmod(position, SLAB_BYTES)
            count = min(SLAB_BYTES - begin, end - position)
            yield self._slabs[index][begin : begin + count]
            position += count

    def _copy(self, part: torch.Tensor, position: int) -> None:
        done = 0
        for stretch in self._stretches(position, part.numel()):
            stretch.copy_(part[done : done + stretch.numel()], non_blocking=True)
            done += stretch.numel()

    def _views(self, position: int, length: int) -> Iterator[memoryview]:
        for stretch in self._stretches(position, length):
            yield stretch.numpy().data


def _data_bytes(plan: RankPlan) -> int:
    return plan.size - len(plan.header)


def available_host_bytes() -> int | None:
    """Memory that copies may still take on this node, or in this job's share of it; None if the system does not say.

    A tenth of what is available stays free, for what else grows: loaders of data, the page cache, other jobs.
    """
    found = [v for v in (_available_on_node(), _available_in_cgroup()) if v is not None]
    return min(found) * 9 // 10 if found else None


def _available_on_node() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def _available_in_cgroup() -> int | None:
    """What is left below the nearest limit (cgroup v2), the page cache counted as free."""
    try:
        path = Path("/proc/self/cgroup").read_text().strip().split("::", 1)[1]
    except (OSError, IndexError):
        return None
    root, left = Path("/sys/fs/cgroup"), []
    folder = root / path.lstrip("/")
    while folder.is_relative_to(root):
        try:
            limit = (folder / "memory.max").read_text().strip()
            if limit != "max":
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
                cached = int(stat["active_file"]) + int(stat["inactive_file"])
                left.append(int(limit) - int((folder / "memory.current").read_text()) + cached)
        except (OSError, KeyError, ValueError):
            pass
        folder = folder.parent
    return max(0, min(left)) if left else None


def ranks_on_this_node() -> int:
    """As the launcher says; 1 if it does not."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
