"""Process groups of the libraries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout


def bound_waiting(groups: Iterable[dist.ProcessGroup | None], seconds: int) -> None:
    """Make collectives of `groups` fail after `seconds`.

    Groups made by device meshes and by DeepSpeed take the library's default (10 or 30 minutes), whatever timeout the
    main group was started with; a lost peer would then hang the others for that long.
    """
    for group in groups:
        if group is not None:
            _set_pg_timeout(timedelta(seconds=seconds), group)


NAMES_SHOWN = 3  # of parameters in a message


def first_names(mine: Sequence[str], order: Iterable[str]) -> tuple[str, ...]:
    """The first few, in `order`, of the names that any rank gives. Collective over all ranks."""
    gathered: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(gathered, list(mine[:NAMES_SHOWN]))
    found = {name for names in gathered for name in names}
    return tuple(name for name in order if name in found)[:NAMES_SHOWN]
