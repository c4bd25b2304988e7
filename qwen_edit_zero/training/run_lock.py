"""One run at a time in a folder: two would overwrite each other's checkpoints and metrics."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from pathlib import Path
from types import TracebackType

from qwen_edit_zero.errors import SettingsError

LOCK_FILE = ".lock"


class RunLock:
    """Holds `folder` for this process, as a context manager. For rank 0 of a run, for as long as the run lasts.

    The lock is the system's (flock), which ends with the process however that ends, and holds between nodes where the
    file system knows locks (NFS, Lustre mounted with flock). Where it does not, nothing is held.

    Raises SettingsError, naming host and process of the run that holds the folder.
    """

    def __init__(self, folder: Path) -> None:
        self._fd: int | None = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _told(os.pread(self._fd, 4096, 0))
            self.release()
            raise SettingsError(
                f"the run folder {folder} is in use by {holder}. Two runs in one folder would overwrite each other's "
                "checkpoints and metrics. Wait until it ends, end it, or choose another run.name"
            ) from None
        except OSError:
            return
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, json.dumps(_mine()).encode(), 0)

    def release(self) -> None:
        """Let others have the folder. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _mine() -> dict[str, str | int]:
    return {"host": socket.gethostname(), "process": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}


def _told(text: bytes) -> str:
    try:
        holder = json.loads(text)
        return f"process {holder['process']} on {holder['host']}, since {holder['since']}"
    except (ValueError, KeyError, TypeError):  # it has just begun
        return "another run"
