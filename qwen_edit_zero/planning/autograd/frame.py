"""Activation checkpointing on the model of autograd: a block of which the inputs are kept, and that is run again.

As `torch.utils.checkpoint` without reentry: tensors are recomputed when the first of them is needed, those of nodes
that are gone are not kept, and recomputation ends with the last tensor that the first pass would have kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from weakref import ref

from qwen_edit_zero.planning.autograd.tape import BYTES, Saved, Storage, Tape, Value


class _Stop(Exception):
    """Everything that backward needs of a block has been recomputed."""


class Frame:
    """A checkpointed block: its inputs, and what is recomputed from them when backward comes to it."""

    def __init__(
        self,
        tape: Tape,
        run: Callable[..., object],
        inputs: Sequence[Value],
        constants: Sequence[Storage],
        *,
        early_stop: bool,
        host: bool,
    ) -> None:
        self.constants = constants
        self._tape, self._run, self._early_stop = tape, run, early_stop
        self.region = tape.region
        self.inputs: list[Value] | None = list(inputs)
        self.host_sizes: list[int] = []
        if host:  # each input is copied to host memory; the device need not keep it
            self._shapes = [(v.shape, v.dtype, v.node, v.output) for v in inputs]
            self.host_sizes = [v.bytes for v in inputs]
            self.inputs = None
        self.packed: list[ref[Saved]] = []
        self.kept: list[tuple[Storage, Storage]] = []  # results of attention, of selective checkpointing
        self._recomputed: dict[int, Storage] | None = None

    def pack(self, storage: Storage | None) -> Saved:
        """Called instead of keeping a tensor in the forward pass."""
        saved = Saved(None, self, len(self.packed))
        self.packed.append(ref(saved))
        return saved

    def take(self, saved: Saved) -> Storage | None:
        """What belongs to `saved`, whose node is run now."""
        if self._recomputed is None:
            self._recompute()
        assert self._recomputed is not None
        return self._recomputed.pop(saved.index, None)

    def _recompute(self) -> None:
        self._recomputed, tape, count = {}, self._tape, 0
        found = self._recomputed
        inputs = self.inputs
        if inputs is None:
            inputs = [
                Value(shape, dtype, Storage(tape, math.prod(shape) * BYTES[dtype]), node, output)
                for shape, dtype, node, output in self._shapes
            ]

        def pack(storage: Storage | None) -> Saved:
            nonlocal count
            if storage is not None and self.packed[count]() is not None:
                found[count] = storage
            count += 1
            if self._early_stop and count == len(self.packed):
                raise _Stop
            return Saved(storage)

        with tape.recomputing(self, pack), suppress(_Stop):
            self._run(*inputs)
