"""The ranks that fill a cache together: who this one is, what part of the work is its own, small words between them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")
Exchange = Callable[[Any], list[Any]]


def _alone(mine: Any) -> list[Any]:
    return [mine]


@dataclass(frozen=True)
class Ranks:
    """This rank among `size`. What ranks tell each other about rows goes through files; `exchange` is for small things.

    Attributes:
        exchange: gathers one small object a rank into a list in rank order, on every rank; a collective.
    """

    rank: int = 0
    size: int = 1
    exchange: Exchange = _alone

    @property
    def first(self) -> bool:
        """Whether this is rank 0, which does what is done once."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """This rank's contiguous part of `range(count)`; parts differ by one at most."""
        base, extra = divmod(count, self.size)
        start = self.rank * base + min(self.rank, extra)
        return range(start, start + base + (self.rank < extra))

    def from_first(self, value: T | None) -> T:
        """Rank 0's small object, on every rank. Collective."""
        told: T = self.exchange(value if self.first else None)[0]
        return told

    def total(self, value: int) -> int:
        """Sum over the ranks. Collective."""
        return int(sum(self.exchange(value)))

    def wait(self) -> None:
        """Wait for all ranks. Collective."""
        if self.size > 1:
            self.exchange(None)
