"""Counting the bytes of live tensor storage, as an allocator would see them, and the collectives."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class StorageCensus(TorchDispatchMode):
    """While active, follows every storage that an operation makes until it is freed.

    Meta tensors do not count, nor do `outside` tensors that were there before.

    Attributes:
        live: bytes alive now.
        peak: the most bytes alive at any time.
    """

    def __init__(self, outside: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._outside = list(outside)
        self._known = {tensor.untyped_storage()._cdata for tensor in self._outside}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if type(tensor) is torch.Tensor and not tensor.is_meta:
                storage = tensor.untyped_storage()
                key, size = storage._cdata, storage.nbytes()
                if size and key not in self._known:
                    self._known.add(key)
                    self.live += size
                    self.peak = max(self.peak, self.live)
                    weakref.finalize(storage, self._freed, key, size)
        return out

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


class CollectiveCensus(TorchDispatchMode):
    """While active, counts collectives by name (`allreduce`, `reduce_scatter`, `reduce`, `allgather` ...)."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            name = func.overloadpacket.__name__.strip("_")
            self.counts[name.replace("_base", "").replace("_tensor", "").strip("_")] += 1
        return func(*args, **(kwargs or {}))
