"""Silent corruption: do ranks that must hold the same hold the same, and compute the same?

Two comparisons, both to the bit. Of what every rank holds a whole copy of (all parameters under DDP and ZeRO-1/2), a
digest: the sum of the bits as integers. And of one micro-batch, the same on all ranks, the losses of a forward pass:
under FSDP2 and ZeRO-3 each rank gathers the same weights for it. A device or a memory module that errs without a word
is found by either.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from qwen_edit_zero.cluster.collectives import from_rank_0, gather_numbers, gather_objects
from qwen_edit_zero.engines.base import ParallelEngine
from qwen_edit_zero.errors import RunError
from qwen_edit_zero.training.metrics import StepMetrics
from qwen_edit_zero.training.stragglers import LastStep

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAMED = 8  # ranks in a message


class ReplayHook:
    """Compares every `every` steps. A hook of the trainer, on every rank.

    Args:
        losses: per-sample losses of a batch, given the engine's forward.
        differs: told on rank 0 what differs, and by which ranks.
        stop: end the run by RunError, on all ranks, instead of going on.
    """

    def __init__(
        self,
        engine: ParallelEngine,
        losses: Callable[[Callable[..., Any], Any], torch.Tensor],
        last: LastStep,
        every: int,
        differs: Callable[[str, list[int]], None],
        *,
        stop: bool,
    ) -> None:
        self._engine, self._losses, self._last, self._every = engine, losses, last, every
        self._differs, self._stop = differs, stop

    def after_step(self, metrics: StepMetrics, *, is_last: bool) -> None:
        """Collective in every `every`-th step. Raises RunError if ranks differ and the run is to stop."""
        if metrics.step % self._every:
            return
        told = [
            (what, ranks)
            for what, mine in (
                ("replicated parameters", digests(self._engine.module)),
                ("the losses of one micro-batch", self._replayed()),
            )
            if (ranks := odd_ranks(gather_numbers(total(mine), self._engine.device).view(-1).tolist()))
        ]
        if not told:
            return
        hosts = gather_objects(socket.gethostname())
        for what, ranks in told:
            named = ", ".join(f"{rank} ({hosts[rank]})" for rank in ranks[:_NAMED])
            more = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
            rest = "the others" if len(hosts) > 2 else "the other, or that one from it"
            text = (
                f"step {metrics.step}: {what} differ between ranks, which must be the same to the bit: rank "
                f"{named}{more} differs from {rest}. A device or its memory errs: take the node out, and go on from a "
                "checkpoint that is older than the error"
            )
            if self._engine.ranks.rank == 0:
                self._differs(text, ranks)
        if self._stop:
            raise RunError(text)

    def _replayed(self) -> torch.Tensor:
        """The losses of rank 0's last micro-batch, computed by every rank."""
        batch = from_rank_0(self._last.batch.to(torch.device("cpu")) if self._engine.ranks.rank == 0 else None)
        if batch is None:  # nothing has been trained yet
            return torch.zeros(1, dtype=torch.int64)
        with self._engine.eval_mode():
            losses = self._losses(self._engine.forward, batch.to(self._engine.device))
        return bits(losses.detach().float()).cpu()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory seen as integers."""
    return tensor.contiguous().view(_INTEGERS[tensor.element_size()])


def digests(module: torch.nn.Module) -> torch.Tensor:
    """(n,) int64, a number for each parameter and buffer of which this rank holds all: the sum of its bits."""
    sums = [bits(tensor).sum(dtype=torch.int64) for tensor in _whole(module)]
    return torch.stack(sums).cpu() if sums else torch.zeros(1, dtype=torch.int64)


def _whole(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    for tensor in (*module.parameters(), *module.buffers()):
        is_sharded = hasattr(tensor, "placements") or hasattr(tensor, "ds_id")
        if not is_sharded and tensor.numel() and not tensor.is_complex():
            yield tensor.detach()


def total(numbers: torch.Tensor) -> torch.Tensor:
    """(1,) int64 of (n,) int64, in which every element and its place count; wraps around."""
    places = torch.arange(1, 2 * numbers.numel() + 1, 2, dtype=torch.int64)
    return (numbers.to(torch.int64) * places).sum().view(1)


def odd_ranks(values: Sequence[int]) -> list[int]:
    """Ranks whose value is not that of most; of a tie, all but those that agree with the first."""
    counts = Counter(values)
    if len(counts) == 1:
        return []
    most = max(counts.values())
    usual = next(value for value in values if counts[value] == most)
    return [rank for rank, value in enumerate(values) if value != usual]
