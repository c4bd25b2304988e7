"""Batches on their way to a GPU beside what it computes."""

from __future__ import annotations

import threading

import torch

from qwen_edit_zero.edit_data.batches.batch import EditBatch


class DeviceCopies:
    """Copies batches through page-locked memory on a stream of its own. Needs CUDA.

    Threads `start` copies; the one that computes lets its stream, not itself, wait for the arrival.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._arrivals: dict[int, torch.cuda.Event] = {}

    def start(self, batch: EditBatch) -> EditBatch:
        """Begin to copy a batch; what is returned may be used after `await_arrival`."""
        # A new thread's device is the first one: page-locking there would open that GPU in every rank's process.
        # torch keeps page-locked memory until the copies out of it are done.
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            moved = batch.pin_memory().to(self._device, non_blocking=True)
            arrival = torch.cuda.Event()  # type: ignore[no-untyped-call]
            arrival.record(self._stream)
        with self._lock:
            self._arrivals[id(moved)] = arrival
        return moved

    def await_arrival(self, batch: EditBatch) -> None:
        """Let the current stream wait until a batch of `start` is there, and keep its memory until it is done."""
        with self._lock:
            arrival = self._arrivals.pop(id(batch))
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(arrival)
        for tensor in batch.tensors():
            tensor.record_stream(stream)
