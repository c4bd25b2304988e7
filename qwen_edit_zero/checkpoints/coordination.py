"""Ranks that do something together, and fail together with the same words.

Only a few short strings travel between ranks, whatever the size of the checkpoint: long lists go through files.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch.distributed as dist

from qwen_edit_zero.checkpoints.disk import advice
from qwen_edit_zero.errors import CheckpointError, QwenEditError, RunError, StorageError

T = TypeVar("T")
_SHOWN = 3  # failures told in full in one message


class Coordinator:
    """The ranks of a process group; a single one if torch.distributed is not started."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self._alone else dist.get_rank(group)
        self.world_size = 1 if self._alone else dist.get_world_size(group)

    def gather(self, value: T) -> list[T]:
        """The small, picklable values of all ranks, on every rank."""
        if self._alone:
            return [value]
        values: list[T | None] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self._group)
        return values  # type: ignore[return-value]

    @contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run the block, then learn how it went elsewhere: if it raised on any rank, it raises on all.

        Every rank raises the same error with the same message, which names the ranks and hosts that failed:
        StorageError if it was storage everywhere (an OSError), CheckpointError if it was that, RunError for the rest.
        """
        failure: tuple[str, str] | None = None
        cause: Exception | None = None
        try:
            yield
        except Exception as error:
            cause = error
            failure = (_kind(error), f"rank {self.rank} on {socket.gethostname()}: {_words(error)}")
        failures = [f for f in self.gather(failure) if f is not None]
        if not failures:
            return
        said = "; ".join(text for _, text in failures[:_SHOWN])
        if len(failures) > _SHOWN:
            said += f"; and {len(failures) - _SHOWN} more ranks"
        kinds = {kind for kind, _ in failures}
        raise _RAISED[kinds.pop() if len(kinds) == 1 else "other"](f"{doing} failed: {said}") from cause


_RAISED: dict[str, type[QwenEditError]] = {"checkpoint": CheckpointError, "storage": StorageError, "other": RunError}


def _kind(error: Exception) -> str:
    if isinstance(error, CheckpointError):
        return "checkpoint"
    return "storage" if isinstance(error, StorageError | OSError) else "other"


def _words(error: Exception) -> str:
    if isinstance(error, QwenEditError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        where = f" ({error.filename})" if error.filename else ""
        return f"{error.strerror}{where}{advice(error)}"
    return f"{type(error).__name__}: {error}"
