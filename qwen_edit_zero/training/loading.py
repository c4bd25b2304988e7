"""A checkpoint read into an engine by all ranks, and compared with its checksums on the way."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from qwen_edit_zero.checkpoints.disk import bytes_text
from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.checkpoints.shared_reading import SharedReading
from qwen_edit_zero.engines.base import ParallelEngine

_TELL_SECONDS = 10.0


def load_checkpoint(
    engine: ParallelEngine, reader: CheckpointReader, say: Callable[[str], None], *, frozen: bool = False
) -> None:
    """Fill an engine that is set up with a checkpoint's state; `frozen` parameters, too, if it says so. Collective.

    Raises CheckpointError if it does not fit the engine, DamagedError if a rank could not read it, both on all ranks
    with the same message. After DamagedError the engine's state is of no use, but another checkpoint can be loaded.
    """
    with _telling(reader, say):
        shared = SharedReading(reader)
        notes = engine.load_state(shared, reader.run_state["engine"], frozen=frozen)
        shared.finish(engine.device)
    for note in notes or ():
        say(note)


def check_whole(reader: CheckpointReader, device: torch.device, say: Callable[[str], None]) -> None:
    """Compare every stored range with its checksum, dealt out to the ranks. Collective. Raises DamagedError on all."""
    with _telling(reader, say):
        SharedReading(reader).finish(device)


@contextmanager
def _telling(reader: CheckpointReader, say: Callable[[str], None]) -> Iterator[None]:
    """Say every few seconds how much this rank has read."""
    told = time.monotonic()

    def tell() -> None:
        nonlocal told
        if time.monotonic() - told >= _TELL_SECONDS:
            told = time.monotonic()
            say(
                f"reading {reader.path.name}: this rank has read {bytes_text(reader.bytes_read)}; all of it is "
                f"{bytes_text(reader.manifest.size)}"
            )

    reader.on_read = tell
    try:
        yield
    finally:
        reader.on_read = None
