"""Arrays in `.npy` files, mapped."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

# numpy reads the header with `ast.literal_eval`, which two threads at once confuse in Python 3.11 (SystemError: AST
# constructor recursion depth mismatch)
_one_at_a_time = threading.Lock()


def mapped_array(path: Path) -> npt.NDArray[Any]:
    """The array of a file, mapped read-only, as a plain array: values are looked up slowly in the subclass.

    Raises OSError, or ValueError if it is no such file.
    """
    with _one_at_a_time:
        try:
            return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        except EOFError as error:
            raise ValueError(f"{path} is empty") from error
        except ValueError:  # nothing can be mapped of an empty array
            return np.asarray(np.load(path, allow_pickle=False))
