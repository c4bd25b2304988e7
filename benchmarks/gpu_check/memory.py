"""Memory of a device as its allocator counts it; on CPUs, where nothing counts, live tensor storage."""

from __future__ import annotations

import gc

import torch

from benchmarks.engines.census import MemoryCensus
from qwen_edit_zero.training.metrics import memory_peak_bytes


class DeviceMemory:
    """Bytes that came to be after this was made."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        release(device)
        self._census = None if device.type == "cuda" else MemoryCensus()
        self._before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0

    def allocated(self) -> int:
        """Bytes in use now, position tables aside."""
        gc.collect()
        if self._census is None:
            return torch.cuda.memory_allocated(self._device) - self._before
        count = self._census.count()
        count.pop("complex64", 0)
        return sum(count.values())


def release(device: torch.device) -> None:
    """Give back what nobody holds, and count the peak anew."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def peak(device: torch.device) -> int:
    """Most bytes in use since `release`; on a CPU the largest resident set of the process."""
    return memory_peak_bytes(device)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
