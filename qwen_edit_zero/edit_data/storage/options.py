"""How stores are asked, in a form that places carry into threads and processes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from qwen_edit_zero.settings.models import StorageSettings


@dataclass(frozen=True, slots=True)
class StorageOptions:
    """Small, hashable, picklable; without credentials.

    Attributes:
        retries: how often a request is repeated after a failure that may pass.
        timeout_seconds: to connect, and between two bytes of an answer.
        cache_dir: folder of the node's cache of whole objects; None: none.
        cache_bytes: most bytes it holds.
        index_dir: folder where indexes of tar archives are kept, on a file system that all ranks share; None: every
            process makes its own and keeps it in memory.
    """

    retries: int = 5
    timeout_seconds: float = 30.0
    cache_dir: Path | None = None
    cache_bytes: int = 20_000_000_000
    index_dir: Path | None = None

    @classmethod
    def of(cls, settings: StorageSettings, *, index_dir: Path | None = None) -> StorageOptions:
        """From the settings `data.storage`; `index_dir` as above, best a folder of the cache."""
        cache_dir = settings.cache_dir and Path(os.path.abspath(settings.cache_dir.expanduser()))
        return cls(settings.retries, settings.timeout_seconds, cache_dir, int(settings.cache_gb * 10**9), index_dir)


DEFAULTS = StorageOptions()
