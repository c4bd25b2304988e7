"""RUN/logs/hang-rank-00003.txt: where a rank is when the run hangs."""

from __future__ import annotations

import faulthandler
import os
import socket
import time
from pathlib import Path

from qwen_edit_zero.cluster.pulse import position


def write_stacks(folder: Path, rank: int, why: str) -> Path:
    """Write where this rank is in the step, its samples, its collectives, and the Python stacks of all its threads.

    Returns the file. On GPUs, what NCCL's flight recorder holds (the last collectives of this rank, and which of them
    have begun and ended) goes to `hang-nccl-00003.pickle`, for torchfrtrace. Raises OSError.
    """
    path = folder / f"hang-rank-{rank:05d}.txt"
    since = position.step_began
    with path.open("w", encoding="utf-8") as file:
        file.write(
            f"{time.strftime('%Y-%m-%d %H:%M:%S')} rank {rank} on {socket.gethostname()}, process {os.getpid()}\n"
        )
        file.write(f"{why}\n\n")
        file.write(f"here: {position}, moved on {position.count} times in the step")
        file.write("\n" if since is None else f", which began {time.monotonic() - since:.1f} s ago\n")
        file.write(f"samples of the micro-batch: {', '.join(position.samples) or 'none'}\n")
        collectives = _flight_record(folder / f"hang-nccl-{rank:05d}.pickle")
        file.write(f"collectives: {collectives}\n\n")
        file.flush()
        faulthandler.dump_traceback(file, all_threads=True)
    return path


def _flight_record(path: Path) -> str:
    """What is known of collectives, in words."""
    try:
        from torch._C._distributed_c10d import _dump_nccl_trace  # type: ignore[attr-defined]

        trace = _dump_nccl_trace()
    except (ImportError, RuntimeError):
        return "see the stacks; NCCL is not used"
    path.write_bytes(trace)
    return f"the last ones of NCCL are in {path.name}"
