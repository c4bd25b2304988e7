"""How the ranks of a run share samples: each has its own, or groups of them split the tokens of one."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.models import EngineSettings


@dataclass(frozen=True)
class Ranks:
    """One rank's place. Sequence groups are consecutive ranks, so that they lie on one node where they fit.

    Parameters, gradients, optimizer state and checkpoints are spread over all ranks whatever the sequence groups are;
    samples are dealt out to the groups.

    Attributes:
        rank, world_size: of the whole run.
        sequence_size: ranks that split the tokens of one sample; 1 without sequence parallelism.
        sequence_group: process group of these, or None if there is but one.
    """

    rank: int
    world_size: int
    sequence_size: int = 1
    sequence_group: dist.ProcessGroup | None = None

    @property
    def dp_rank(self) -> int:
        """Which share of the samples this rank computes."""
        return self.rank // self.sequence_size

    @property
    def dp_size(self) -> int:
        """Number of shares of the samples."""
        return self.world_size // self.sequence_size

    @property
    def sequence_rank(self) -> int:
        """Place in the sequence group; the rank at place 0 speaks for the group's samples."""
        return self.rank % self.sequence_size


def arrange_ranks(settings: EngineSettings) -> Ranks:
    """This rank's place, with its sequence group made. Collective.

    Raises SettingsError if `sequence_parallel` does not divide the ranks.
    """
    rank, world, size = dist.get_rank(), dist.get_world_size(), settings.sequence_parallel
    if world % size:
        fitting = [str(n) for n in range(1, world + 1) if world % n == 0]
        raise SettingsError(
            f"engine.sequence_parallel is {size}, which does not divide the {world} ranks of this run into equal "
            f"groups. Sizes that do: {', '.join(fitting)}."
        )
    if size == 1:
        return Ranks(rank, world)
    keep_inside_nodes(size)
    first = rank - rank % size
    group = dist.new_group(
        list(range(first, first + size)),
        timeout=timedelta(seconds=settings.timeout_seconds),
        use_local_synchronization=True,  # each rank makes its own group only, however many there are
    )
    return Ranks(rank, world, size, group)


def keep_inside_nodes(size: int) -> None:
    """Raise SettingsError for groups that would cross nodes although smaller ones would not.

    Groups are consecutive ranks, so they lie in nodes if `size` divides the ranks of a node, or is a multiple of them.
    """
    on_node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if on_node > 1 and on_node % size and size % on_node:
        fitting = [str(n) for n in range(1, on_node + 1) if on_node % n == 0]
        raise SettingsError(
            f"engine.sequence_parallel is {size} with {on_node} ranks on a node, so that some groups would lie in two "
            f"nodes and exchange every block's tokens between them. Sizes that keep inside: {', '.join(fitting)}."
        )
