"""What is known of picture files (content digest, size in pixels), so that an unchanged file is never read twice.

A fact counts as long as the stamp of its file stays what it was: size and what changes whenever content may have. Facts
lie in the cache folder, where `data check`, `cache` and training find them (`notes`).
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import xxhash

from qwen_edit_zero.edit_data.cache.notes import Notes
from qwen_edit_zero.edit_data.cache.ranks import Ranks
from qwen_edit_zero.edit_data.cache.sorted_table import Keys

FACT = np.dtype(
    [
        ("stamp", "<u8"),
        ("digest", np.uint8, 16),  # BLAKE2b of the content
        ("width", "<i4"),  # of the upright picture
        ("height", "<i4"),
        ("rules", "<u2"),  # version of the rules for headers by which the size was read
        ("flags", "u1"),
        ("unused", "u1"),
    ]
)
FactArray = npt.NDArray[np.void]
NAMED_FACT = np.dtype([("name", np.uint8, 16), ("fact", FACT)])


def name_key(name: str) -> bytes:
    """16 bytes for the whole name of a file."""
    return xxhash.xxh3_128_digest(name.encode("utf-8", "surrogatepass"))


class Facts:
    """Opens the facts of a cache, and notes new ones. Collective at its beginning; a context manager.

    A folder that cannot be written makes this a memory of nothing.

    Args:
        folder: `facts` of a cache.
        alone: nobody else uses the cache: tables no longer wanted are deleted.
    """

    def __init__(self, folder: Path, ranks: Ranks, *, alone: bool = False) -> None:
        self._notes = Notes(folder, FACT, ranks, alone=alone)

    def __len__(self) -> int:
        return len(self._notes)

    def __enter__(self) -> Facts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def find(
        self, names: Keys, stamps: npt.NDArray[np.uint64], *, rules: int
    ) -> tuple[npt.NDArray[np.bool_], FactArray]:
        """(whether each of these files is known with this stamp, its fact; only where known)."""
        there, facts = self._notes.look_up(names)
        return there & (facts["stamp"] == stamps) & (facts["rules"] == rules), facts

    def note(self, facts: FactArray) -> None:
        """Append records of type NAMED_FACT. What cannot be written is forgotten."""
        self._notes.add(facts["name"], facts["fact"])

    def close(self) -> None:
        """End noting. Idempotent."""
        self._notes.close()
