"""Ranks that read a checkpoint together: each its own part, and nothing damaged unnoticed.

A stored range has one checksum. A rank that reads a range as a whole compares it on the way. Where ranks read parts of
a range only, because another number of ranks wrote it, nobody can; such ranges, and those that no rank needs, are dealt
out to the ranks afterwards and read for their checksum alone. So every byte is read once where ranges and shards agree,
and at most once more where they do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.checkpoints.coordination import Coordinator
from qwen_edit_zero.checkpoints.disk import CHUNK_BYTES
from qwen_edit_zero.checkpoints.manifest import Manifest
from qwen_edit_zero.checkpoints.reader import CheckpointReader, DamagedError
from qwen_edit_zero.cluster.collectives import any_over_ranks
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.flat_state import PARAM
from qwen_edit_zero.safetensors_file import ITEM_SIZE

if TYPE_CHECKING:
    import torch

Rows = npt.NDArray[np.int64]
_TOLD = 3  # faults named in a message; the rest is counted


class SharedReading:
    """This rank's part in the reading of a checkpoint by all ranks: a TensorSource that does not raise for damage.

    One rank that raised would leave the others waiting in their next collective. Instead a range that cannot be had is
    given as zeros and noted, and `finish` tells all ranks. What was read is not to be used before that.
    """

    def __init__(self, reader: CheckpointReader) -> None:
        self._reader = reader
        self._faults: list[str] = []

    def names(self, kind: str = PARAM) -> Iterable[str]:
        """See `TensorSource`."""
        return self._reader.names(kind)

    def shape(self, name: str, kind: str = PARAM) -> tuple[int, ...]:
        """See `TensorSource`."""
        return self._reader.shape(name, kind)

    def read(self, name: str, start: int, length: int, kind: str = PARAM) -> torch.Tensor:
        """See `TensorSource`; zeros if they cannot be read or are damaged."""
        import torch

        try:
            return self._reader.read(name, start, length, kind)
        except DamagedError as error:
            self._faults.append(error.fault)
            return torch.zeros(length, dtype=self._reader.torch_dtype(name, kind))

    def finish(self, device: torch.device) -> None:
        """Compare with their checksums all ranges that no rank has read as a whole, dealt out to the ranks. Collective.

        `device` is where tensors of the process group live.
        Raises DamagedError on all ranks, with the same message, if any range is damaged for any rank.
        """
        ranks = Coordinator()
        self._raise_if_faulty(ranks)
        compared = any_over_ranks(self._reader.compared, device)
        buffer = np.empty(CHUNK_BYTES // 8 * 8, dtype=np.uint8)
        for row in share(self._reader.manifest, ~compared, ranks.rank, ranks.world_size).tolist():
            try:
                self._reader.compare_row(row, buffer)
            except DamagedError as error:
                self._faults.append(error.fault)
        self._raise_if_faulty(ranks)

    def _raise_if_faulty(self, ranks: Coordinator) -> None:
        mine = (self._faults[:_TOLD], len(self._faults)) if self._faults else None
        told = [found for found in ranks.gather(mine) if found is not None]
        if told:
            named = list(dict.fromkeys(fault for faults, _ in told for fault in faults))[:_TOLD]
            more = sum(count for _, count in told) - len(named)
            raise DamagedError("; ".join(named) + (f"; and more ({more} other reads failed)" if more > 0 else ""))


def share(manifest: Manifest, wanted: npt.NDArray[np.bool_], rank: int, world_size: int) -> Rows:
    """The rows that one of `world_size` ranks reads of those wanted: equal bytes, in the order in which they lie."""
    if not wanted.any():
        return np.empty(0, np.int64)
    file, offset, size = (
        np.concatenate(column)
        for column in zip(
            *((*t.ranges.places(), t.ranges.byte_sizes(ITEM_SIZE[t.dtype])) for t in manifest.tensors), strict=True
        )
    )
    rows = np.flatnonzero(wanted)
    rows = rows[np.lexsort((offset[rows], file[rows]))]
    ends = np.cumsum(size[rows])
    middles = ends - size[rows] / 2
    mine: Rows = rows[(middles * world_size // max(int(ends[-1]), 1)).astype(np.int64) == rank]
    return mine


@contextmanager
def opened_together(path: Path) -> Iterator[CheckpointReader]:
    """The same checkpoint opened by every rank, its counters compared with their checksum. Collective.

    Raises DamagedError on all ranks, with the same message, if some rank cannot use it or has another save there.
    """
    ranks = Coordinator()
    reader: CheckpointReader | None = None
    try:
        try:
            with ranks.together(f"opening {path}"):
                reader = CheckpointReader(path)
                _ = reader.run_state
        except CheckpointError as error:
            raise DamagedError(str(error)) from error
        assert reader is not None
        if len(set(ranks.gather(reader.manifest.save_id))) > 1:
            raise DamagedError(f"{path} is another save to some ranks than to others: is run.dir a shared folder?")
        yield reader
    finally:
        if reader is not None:
            reader.close()
