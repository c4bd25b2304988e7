"""A model of autograd without numbers: tensors that have a shape, a dtype and a storage, and live as torch's do.

The forward pass of the network (`network.py`) is written in operations (`operations.py`) on such tensors. A node
keeps what torch's keeps for its backward pass; a storage is freed when nothing refers to it any more, by Python's own
counting of references, which is also what frees torch's. So memory is not estimated: the same program is run, with
sizes only.
"""

from __future__ import annotations

import heapq
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qwen_edit_zero.planning.autograd.frame import Frame

BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "complex64": 8, "int32": 4, "bool": 1}
_RANKS = ("bool", "int32", "bf16", "fp16", "fp32", "complex64")

Shape = tuple[int, ...]
Gradients = Sequence["Storage | None"]


def promoted(*dtypes: str) -> str:
    """The dtype in which torch computes with tensors of these."""
    return max(dtypes, key=_RANKS.index)


class Region:
    """A block of which the model has `count` that do the same, of which one is run; `flops` of its forward pass."""

    __slots__ = ("count", "flops")

    def __init__(self) -> None:
        self.count, self.flops = 1, 0


class Storage:
    """Memory of the device; `kind` is "activation", "weight copy", or "given" for what is not counted."""

    __slots__ = ("__weakref__", "_tape", "bytes", "kind", "label", "region")

    def __init__(self, tape: Tape, size: int, kind: str = "activation") -> None:
        self._tape, self.bytes, self.kind = tape, size, kind
        self.label, self.region = "", tape.region
        tape.allocate(0 if kind == "given" else size)

    def __del__(self) -> None:
        if self.kind != "given":
            self._tape.live -= self.bytes


class Saved:
    """A tensor that a node keeps: a storage, or what is recomputed as number `index` of a checkpointed block."""

    __slots__ = ("__weakref__", "frame", "index", "storage")

    def __init__(self, storage: Storage | None, frame: Frame | None = None, index: int = 0) -> None:
        self.storage, self.frame, self.index = storage, frame, index

    def unpack(self) -> Storage | None:
        """The storage; a block that was not kept is computed again."""
        return self.storage if self.frame is None else self.frame.take(self)


class Node:
    """An operation of the graph, and how its gradients are computed."""

    __slots__ = ("__weakref__", "backward", "inputs", "name", "outputs", "region", "saved", "sequence")

    def __init__(self, tape: Tape, name: str, inputs: Sequence[tuple[Node, int] | None], outputs: int) -> None:
        self.name, self.inputs, self.outputs, self.region = name, inputs, outputs, tape.region
        self.saved: list[Saved] = []
        self.backward: Callable[[Gradients], Gradients] | None = None
        tape.nodes += 1
        self.sequence = tape.nodes


class Value:
    """A tensor. `node` is what made it, if it needs a gradient; a leaf that does has a node without a backward pass."""

    __slots__ = ("dtype", "node", "output", "shape", "storage")

    def __init__(self, shape: Shape, dtype: str, storage: Storage, node: Node | None = None, output: int = 0) -> None:
        self.shape, self.dtype, self.storage, self.node, self.output = shape, dtype, storage, node, output

    @property
    def needs_grad(self) -> bool:
        """Whether a gradient of it is computed."""
        return self.node is not None

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of its own elements; its storage may have more."""
        return self.elements * BYTES[self.dtype]


class Tape:
    """What is alive, what it came to at most, and the arithmetic done, in one pass forward and backward.

    Attributes:
        live, peak: bytes on the device of everything but parameters, their gradients and the batch.
        outer_flops: of the forward pass outside of blocks, 2 a multiply-add; matrix products and attention only.
        recomputed_flops, backward_flops: of all blocks and what is outside.
        scores_again: of backward_flops, what fused attention computes a second time.
        grad_enabled: whether nodes are made.
        keeps_attention: a recomputed block keeps what attention's kernel returns.
        cached_not_run: copies of weights that autocast would have made in the blocks that were not run.
        autocast: compute dtype that autocast casts to; None outside of it.
        on_gpu: whose rules for autocast and for normalisation statistics hold.
    """

    def __init__(self, *, autocast: str | None, on_gpu: bool) -> None:
        self.autocast, self.on_gpu = autocast, on_gpu
        self.live = self.peak = self.nodes = 0
        self.outer_flops = self.recomputed_flops = self.backward_flops = self.scores_again = 0
        self.region: Region | None = None
        self.frame: Frame | None = None  # the checkpointed block that runs
        self.recomputes = False
        self.keeps_attention = False
        self.grad_enabled = True
        self.cached_not_run = 0
        self._pack: Callable[[Storage | None], Saved] | None = None
        self._casts: dict[str, Value] = {}

    def allocate(self, size: int) -> None:
        """Count memory taken."""
        self.live += size
        self.peak = max(self.peak, self.live)

    def new(self, shape: Shape, dtype: str) -> Storage:
        """Memory for a tensor."""
        return Storage(self, math.prod(shape) * BYTES[dtype])

    def given(self, shape: Shape, dtype: str, *, needs_grad: bool = False) -> Value:
        """A tensor that is not counted: a parameter, or part of the batch."""
        return Value(shape, dtype, Storage(self, 0, "given"), Node(self, "leaf", (), 1) if needs_grad else None)

    def save(self, node: Node, storage: Storage) -> None:
        """Let `node` keep a tensor for its backward pass."""
        if not storage.label:
            storage.label = node.name
        node.saved.append(Saved(storage) if self._pack is None else self._pack(storage))

    def compute(self, flops: int) -> None:
        """Count arithmetic of the forward pass, first or again."""
        if self.recomputes:
            self.recomputed_flops += flops * (1 if self.region is None else self.region.count)
        elif self.region is None:
            self.outer_flops += flops
        else:
            self.region.flops += flops

    def cast_weight(self, name: str, make: Callable[[], Value]) -> Value:
        """The copy of a weight in the compute dtype that autocast makes once in its context."""
        if name not in self._casts:
            self._casts[name] = make()
        return self._casts[name]

    def leave_autocast(self) -> None:
        """The copies of weights that no node keeps are dropped."""
        self.cached_not_run = sum(
            cast.storage.bytes * (cast.storage.region.count - 1)
            for cast in self._casts.values()
            if cast.storage.region is not None
        )
        self._casts.clear()

    @contextmanager
    def checkpoint(self, frame: Frame) -> Iterator[None]:
        """The first forward pass of a block that is recomputed."""
        self.frame, self._pack = frame, frame.pack
        try:
            yield
        finally:
            self.frame = self._pack = None

    @contextmanager
    def recomputing(self, frame: Frame, pack: Callable[[Storage | None], Saved]) -> Iterator[None]:
        """The second one."""
        casts, self._casts = self._casts, {}
        region, self.region = self.region, frame.region
        self.frame, self._pack, self.recomputes = frame, pack, True
        try:
            yield
        finally:
            self.frame = self._pack = None
            self.recomputes, self.region, self._casts = False, region, casts

    def backward(self, root: Value) -> None:
        """Run every node that `root` depends on, last made first, as autograd's engine does."""
        assert root.node is not None, "nothing trains"
        pending: dict[Node, list[Storage | None]] = {root.node: [self.new(root.shape, root.dtype)]}
        order = [(-root.node.sequence, root.node)]
        root.node = None  # the graph is given up as it is used
        while order:
            node = heapq.heappop(order)[1]
            incoming = pending.pop(node)
            if node.backward is None:  # a parameter: its gradient is the engine's business
                continue
            self.region = node.region
            storages = [saved.unpack() for saved in node.saved]
            outgoing = list(node.backward(incoming))
            node.saved.clear()
            node.backward = None
            storages.clear()
            incoming.clear()
            for index, edge in enumerate(node.inputs):
                gradient, outgoing[index] = outgoing[index], None
                if edge is not None and gradient is not None:
                    target, output = edge
                    if target not in pending:
                        pending[target] = [None] * target.outputs
                        heapq.heappush(order, (-target.sequence, target))
                    self._add(pending[target], output, gradient)
                del gradient
            node.inputs = ()
            del node, outgoing
        self.region = None

    def _add(self, sums: list[Storage | None], output: int, gradient: Storage) -> None:
        """Add a gradient to those of the same tensor: in place, in a buffer that nothing else uses, else in a new one.

        References counted: 2 of `sums` and the call; 4 of the caller, the two of this function, and the call.
        """
        if sums[output] is None:
            sums[output] = gradient
        elif sys.getrefcount(sums[output]) > 2:
            old = sums[output]
            assert old is not None
            sums[output] = gradient if sys.getrefcount(gradient) <= 4 else Storage(self, min(old.bytes, gradient.bytes))

    def count_backward(self, flops: int, *, scores: int = 0) -> None:
        """Count arithmetic of the node whose backward pass runs."""
        times = 1 if self.region is None else self.region.count
        self.backward_flops += flops * times
        self.scores_again += scores * times
