"""Counting what is alive and what is sent."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def _storages() -> Iterator[tuple[int, int, torch.dtype]]:
    """(address, bytes, dtype of a tensor in it) of every live tensor and gradient; DTensors are their local parts."""
    for found in gc.get_objects():
        if not issubclass(type(found), torch.Tensor):
            continue
        for tensor in (found, found.grad if found.is_leaf else None):
            if isinstance(tensor, DTensor):
                tensor = tensor._local_tensor
            if tensor is not None and tensor.device.type != "meta" and tensor.layout is torch.strided:
                storage = tensor.untyped_storage()
                if storage.nbytes():
                    yield storage.data_ptr(), storage.nbytes(), tensor.dtype


class MemoryCensus:
    """Bytes of tensor storage that came to be after this was made, each storage once."""

    def __init__(self) -> None:
        gc.collect()
        self._before = {address for address, _, _ in _storages()}

    def count(self) -> dict[str, int]:
        """Bytes alive now, by dtype."""
        gc.collect()
        found = {address: (size, dtype) for address, size, dtype in _storages() if address not in self._before}
        totals: Counter[str] = Counter()
        for size, dtype in found.values():
            totals[str(dtype).removeprefix("torch.")] += size
        return dict(totals)


class WireCensus(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, adds up the payload of every collective by kind.

    A payload is what the collective is about: an all-gather's output, a reduce-scatter's input, the tensor that is
    reduced or broadcast. Payloads of at most `small` bytes (the norm, flags) are counted apart.
    """

    _KINDS = {
        "allgather": "all-gather",
        "reduce_scatter": "reduce-scatter",
        "allreduce": "all-reduce",
        "reduce": "reduce",
        "broadcast": "broadcast",
    }

    def __init__(self, small: int = 16) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self._small = small

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            name = func.overloadpacket.__name__.strip("_")
            payload = max(self._size(argument) for argument in args[:2])
            if payload:
                # in this order: "reduce_scatter" also starts with "reduce"
                kind = next(said for prefix, said in self._KINDS.items() if name.startswith(prefix))
                kind = "small" if payload <= self._small else kind
                self.bytes[kind] += payload
                self.calls[kind] += 1
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _size(argument: Any) -> int:
        return sum(leaf.nbytes for leaf in tree_leaves(argument) if isinstance(leaf, torch.Tensor))
