"""Process groups of the libraries."""

from __future__ import annotations

from collections.abc import Iterable
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
