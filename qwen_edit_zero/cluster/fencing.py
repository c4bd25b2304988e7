"""Which start of a run may write into its folder: the last one that took it, and no other.

Each start puts a token of its own into the folder by one rename, which is atomic on every file system, NFS included.
Before anything is committed, the token is read again: `open` asks the server, whatever a client has cached (NFS,
close-to-open). A copy that was frozen, or cut off, or requeued elsewhere meanwhile finds another token, and ends.

Between look and commit there is a moment. It cannot hurt where the commit is the rename of something that the newer
start has deleted when it took over: see `checkpoints/placement.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path

from qwen_edit_zero.errors import FencedError, StorageError

FENCE_FILE = ".fence"
_OFTEN_SECONDS = 1.0
_ATTEMPTS = 3


@dataclass(frozen=True)
class Token:
    """One start of a run: `number` counts the starts of a folder, `name` tells apart two that began at once."""

    number: int
    name: str
    host: str
    process: int
    since: str

    def __str__(self) -> str:
        return f"start {self.number} (process {self.process} on {self.host}, since {self.since})"


class Fence:
    """This start's claim on `folder`, taken by making one. Raises OSError if it cannot be written."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._path = folder, folder / FENCE_FILE
        earlier = _read(self._path)
        self.token = Token(
            number=1 if earlier is None else earlier.number + 1,
            name=uuid.uuid4().hex,
            host=socket.gethostname(),
            process=os.getpid(),
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
        )
        temporary = self._path.with_name(f"{FENCE_FILE}.{self.token.name}")
        with temporary.open("w", encoding="utf-8") as file:
            json.dump(asdict(self.token), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._path)
        self._checked = time.monotonic()

    def check(self) -> None:
        """Raise FencedError if another start has taken the folder since, StorageError if the folder has gone."""
        found = None
        for attempt in range(_ATTEMPTS):
            if (found := _read(self._path)) is not None:
                break
            time.sleep(0.1 * attempt)  # a file server that begins anew answers the second time
        if found is None:
            raise StorageError(
                f"{self._path} cannot be read any more, so it cannot be known whether another start of this run has "
                f"taken over: was {self._folder} deleted, moved, or its file system unmounted?"
            )
        if found.name != self.token.name:
            raise FencedError(
                f"the run folder {self._folder} now belongs to {found}. This copy of the run, start "
                f"{self.token.number}, ends, and writes nothing into it"
            )
        self._checked = time.monotonic()

    def check_often(self) -> None:
        """As `check`, for what happens at every step: looks once a second, or when this process has slept."""
        if time.monotonic() - self._checked > _OFTEN_SECONDS:
            self.check()


def _read(path: Path) -> Token | None:
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Token(**json.loads(path.read_text(encoding="utf-8")))
    return None
