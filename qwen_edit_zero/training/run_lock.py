"""One run at a time in a folder: two would overwrite each other's checkpoints and metrics.

A run that is alive holds the folder. One that is not, or cannot be known to be (its node was cut off, or froze), must
not hold up its successor for ever. So the folder is taken from its holder
- by a later start of the same job: Slurm has requeued it (SLURM_RESTART_COUNT), or torchrun restarted it under a
  --rdzv-id; either has given up the earlier one;
- by `--take-over`, with which the user says that the holder is gone.
The holder, should it live, finds the fence (`cluster/fencing.py`) changed before it writes anything, and ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from qwen_edit_zero.cluster.fencing import Fence
from qwen_edit_zero.cluster.identity import int_or_none
from qwen_edit_zero.errors import SettingsError

LOCK_FILE = ".lock"


class RunLock:
    """Holds `folder` for this process, as a context manager. For rank 0 of a run, for as long as the run lasts.

    The lock is the system's (flock), which ends with the process however that ends, and holds between nodes where the
    file system knows locks (NFS, Lustre mounted with flock). Where it does not, nothing is held; the fence counts.

    Attributes:
        fence: to be asked before anything is committed into the folder.
        taken_from: the holder that the folder was taken from, in words; None if it was free.

    Raises SettingsError, naming host and process of the run that holds the folder.
    """

    def __init__(self, folder: Path, *, take_over: bool = False, environ: Mapping[str, str] | None = None) -> None:
        me = _mine(os.environ if environ is None else environ)
        self._path = folder / LOCK_FILE
        self._fd: int | None = None
        self.taken_from: str | None = None
        try:
            self._acquire()
        except BlockingIOError:
            holder = _holder(self._path)
            if not (take_over or _gave_up(holder, me)):
                raise SettingsError(
                    f"the run folder {folder} is in use by {_told(holder)}. Two runs in one folder would overwrite "
                    "each other's checkpoints and metrics. Wait until it ends, end it, or choose another run.name; if "
                    "it is gone for good (its node died or was cut off), take the folder from it by --take-over"
                ) from None
            self.taken_from = _told(holder)
            self._replace()
        if self._fd is not None:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps(me).encode(), 0)
        self.fence = Fence(folder)

    def _acquire(self) -> None:
        """Hold the file that has the lock's name now. Raises BlockingIOError if somebody else does."""
        while True:
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                raise
            except OSError:  # the file system knows no locks
                os.close(fd)
                return
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(fd), os.stat(self._path)):
                    self._fd = fd
                    return
            os.close(fd)  # it was replaced while it was opened

    def _replace(self) -> None:
        """Give the lock's name to a file of our own: the holder keeps one that has no name any more."""
        temporary = self._path.with_name(f"{LOCK_FILE}.{uuid.uuid4().hex}")
        self._fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with contextlib.suppress(OSError):
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.replace(temporary, self._path)

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


def _mine(environ: Mapping[str, str]) -> dict[str, Any]:
    told: dict[str, Any] = {
        "host": socket.gethostname(),
        "process": os.getpid(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    if environ.get("SLURM_JOB_ID"):
        restarts = int_or_none(environ.get("SLURM_RESTART_COUNT"))
        told |= {"job": f"Slurm job {environ['SLURM_JOB_ID']}", "restarts": restarts or 0}
    elif environ.get("TORCHELASTIC_RUN_ID", "none") != "none":
        restarts = int_or_none(environ.get("TORCHELASTIC_RESTART_COUNT"))
        told |= {"job": f"torchrun job {environ['TORCHELASTIC_RUN_ID']}", "restarts": restarts or 0}
    return told


def _gave_up(holder: Mapping[str, Any], me: Mapping[str, Any]) -> bool:
    """Whether the holder is an earlier start of this very job."""
    restarts = holder.get("restarts")
    return "job" in me and holder.get("job") == me["job"] and isinstance(restarts, int) and restarts < me["restarts"]


def _holder(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        holder = json.loads(path.read_bytes())
        if isinstance(holder, dict):
            return holder
    return {}  # it has just begun


def _told(holder: Mapping[str, Any]) -> str:
    try:
        job = f" ({holder['job']})" if "job" in holder else ""
        return f"process {holder['process']} on {holder['host']}{job}, since {holder['since']}"
    except KeyError:
        return "another run"
