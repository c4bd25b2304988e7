"""What a check finds out about each row, as columns on disk: every process writes its own rows, in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

UNSEEN, ACCEPTED, WARNED, REFUSED = 0, 1, 2, 3

Column = npt.NDArray[Any]


class RowColumns:
    """The columns of a table of n rows, memory-mapped; zeros at first.

    Attributes:
        state: (n,) uint8, one of UNSEEN, ACCEPTED, WARNED, REFUSED.
        sizes: (n, 1 + references + 1, 2) int32, upright (width, height) of target, references and mask; 0 for none.
        digests: (n, 1 + references + 1, 16) uint8, of the contents.
        language: (n,) uint8, number in `texts.LANGUAGES`.
        length: (n,) int32, tokens of the instruction, or characters if the tokenizer is not known.
        words: (n,) uint64, hash of the instruction as it is encoded.
    """

    def __init__(self, folder: Path, rows: int, references: int, *, new: bool) -> None:
        def column(name: str, dtype: npt.DTypeLike, *shape: int) -> Column:
            path = folder / f"{name}.npy"
            if rows == 0:
                return np.zeros((0, *shape), dtype)
            if new:
                np.lib.format.open_memmap(path, "w+", np.dtype(dtype), (rows, *shape)).flush()
            return np.asarray(np.lib.format.open_memmap(path, "r+"))

        self.state = column("state", np.uint8)
        self.sizes = column("sizes", np.int32, references + 2, 2)
        self.digests = column("digests", np.uint8, references + 2, 16)
        self.language = column("language", np.uint8)
        self.length = column("length", np.int32)
        self.words = column("words", np.uint64)

    def __len__(self) -> int:
        return len(self.state)
