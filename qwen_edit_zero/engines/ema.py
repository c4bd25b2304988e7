"""A running average of the trained weights (EMA), in fp32, held by each rank for just the elements it owns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from qwen_edit_zero.engines.shards import Shard, check_kind
from qwen_edit_zero.engines.step_counts import COMMON
from qwen_edit_zero.flat_state import EMA, TensorSource
from qwen_edit_zero.settings.models import OptimizerSettings

UPDATES = "ema_updates"  # in the saved scalars of an engine
Masters = Mapping[str, torch.Tensor]  # 1-D fp32 by parameter: the elements that this rank owns


class WeightAverage:
    """After every applied step: average = d * average + (1 - d) * weights, with d the decay (Polyak averaging).

    With warm-up d = min(decay, (1 + n) / (10 + n)) after n updates, as `num_updates` of
    tensorflow.train.ExponentialMovingAverage has it. It starts from the weights, so it has no bias to correct.

    It takes 4 bytes an element owned, on the device of the masters, and nothing while it is updated.
    """

    def __init__(self, settings: OptimizerSettings, masters: Masters) -> None:
        assert settings.ema is not None
        self._decay, self._warmup = settings.ema, settings.ema_warmup
        self._updates = 0
        self._values = {name: master.detach().clone() for name, master in masters.items()}

    def __getitem__(self, name: str) -> torch.Tensor:
        """The average of a parameter's elements, 1-D."""
        return self._values[name]

    def decay(self) -> float:
        """Decay of the next update."""
        if not self._warmup:
            return self._decay
        return min(self._decay, (1 + self._updates) / (10 + self._updates))

    @torch.no_grad()
    def update(self, masters: Masters) -> None:
        """Take in the weights after a step."""
        weight = 1.0 - self.decay()
        if self._values:
            weights = [masters[name].detach() for name in self._values]
            torch._foreach_lerp_(list(self._values.values()), weights, weight)
        self._updates += 1

    def scalars(self) -> dict[str, Any]:
        """To be saved beside the averages."""
        return {UPDATES: self._updates}

    @torch.no_grad()
    def load(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        shards: Iterable[Shard],
        source: TensorSource,
        scalars: Mapping[str, Any],
    ) -> tuple[str, ...]:
        """Take over the averages of `source`; start from the weights of `shards`, just loaded, if it has none.

        Returns what the user should know. Raises CheckpointError if `source` has the averages of other parameters
        than `shapes`.
        """
        if not any(True for _ in source.names(EMA)):
            for shard in shards:
                if shard.name in self._values:
                    self._values[shard.name].copy_(shard.values)
            self._updates = 0
            return (
                "optimizer.ema is on, and the checkpoint has no averaged weights: the average starts from its weights",
            )
        check_kind(EMA, shapes, source)
        for shard in shards:
            if shard.name in self._values:
                self._values[shard.name].copy_(source.read(shard.name, shard.start, shard.values.numel(), EMA))
        # Another writer may not count updates; from 0 on, warm-up would drop nearly all of its average.
        self._updates = int(scalars.get(UPDATES, scalars[COMMON]))
        return ()

    @contextmanager
    def swapped(self, masters: Masters) -> Iterator[None]:
        """Inside, `masters` hold the averages and the averages the weights; afterwards every bit is back."""
        self._swap(masters)
        try:
            yield
        finally:
            self._swap(masters)

    @torch.no_grad()
    def _swap(self, masters: Masters) -> None:
        for name, average in self._values.items():
            kept = masters[name].detach().clone()
            masters[name].detach().copy_(average)
            average.copy_(kept)


def unused_average(source: TensorSource) -> tuple[str, ...]:
    """What a user should know who goes on without an average, though the checkpoint has one."""
    if not any(True for _ in source.names(EMA)):
        return ()
    return (
        "the checkpoint has averaged weights, and optimizer.ema is off: the average is not continued, and later "
        "checkpoints have none",
    )
