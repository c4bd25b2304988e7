"""Host memory that the C library keeps after it was freed."""

from __future__ import annotations

import ctypes


def release_freed_memory() -> None:
    """Give freed memory back to the system, where the C library can (glibc).

    Large buffers that are freed while others are allocated stay with the process: after sharding, several blocks of
    the model, which the moments made next would come on top of.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
