"""An examination that does not end: a file system or a network that gives no answer, and on which rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from qwen_edit_zero.cluster import failure
from qwen_edit_zero.cluster.pulse import Seen

ENDS_SECONDS = 90.0  # in which an examination ends, or something stands still
WAITING = "waiting for the others"
_MORE_SECONDS = 10  # after which others speak if rank 0 does not
_SHOWN = 4


@dataclass
class Phase:
    """What is going on, for whoever has to say that it does not end."""

    name: str = "the meeting of all ranks"
    ended: threading.Event = field(default_factory=threading.Event)


def standstill(seconds: float, phase: str, everyone: Sequence[Seen]) -> str:
    """What is said if the doctor does not end: which ranks the others wait for, or that nothing gets through."""
    text = f"the doctor has not ended within {seconds:.0f} s, at: {phase}"
    busy = [seen for seen in everyone if seen.doing != WAITING]
    if 0 < len(busy) < len(everyone):
        more = f", and {len(busy) - _SHOWN} more" if len(busy) > _SHOWN else ""
        shown = ", ".join(str(seen) for seen in busy[:_SHOWN])
        return f"{text}. The others wait for {shown}{more}; look at that node, and whether its file systems answer"
    return (
        f"{text}. Ranks have met, but do not get data through: look at the interface (NCCL_SOCKET_IFNAME, "
        "GLOO_SOCKET_IFNAME) and the firewall; NCCL_DEBUG=INFO tells more"
    )


@contextmanager
def deadline(rank: int, seconds: float) -> Iterator[Phase]:
    """End the job with a word where it stands still, as NCCL does if nodes cannot reach each other."""
    phase = Phase()

    def watch() -> None:
        if not phase.ended.wait(seconds + (0 if rank == 0 else _MORE_SECONDS)):
            failure.end_now(standstill(seconds, phase.name, failure.whereabouts()), 2, asked=False)

    threading.Thread(target=watch, name="doctor-deadline", daemon=True).start()
    try:
        yield phase
    finally:
        phase.ended.set()
