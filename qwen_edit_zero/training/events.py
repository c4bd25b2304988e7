"""RUN/events.jsonl: what happened to a run, one line of JSON each, over all its starts.

    {"time": "2026-01-31T09:00:00+00:00", "event": "save", "start": 2, "step": 200, "host": "node1", "path": ...}

start       this start begins: ranks, engine, launcher
restarted   it follows an earlier one; `after` says how that ended
resumed     it goes on from a checkpoint, after `step` steps
save        a checkpoint is whole
preempted   a signal asked for the end, and the state is saved
validation  the loss on held-out samples has been computed: `loss`, and the best so far
skipped     a step was not applied; `reason`
slow        a rank is persistently slower than the others
differs     ranks do not agree on what they all hold
rolled_back the guard went back to a checkpoint
hang        a step takes far longer than usual
ended       how this start ended: `reason` and exit `status`
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import socket
from pathlib import Path
from typing import Any

from qwen_edit_zero.cluster.fencing import Fence

EVENTS_FILE = "events.jsonl"


class Events:
    """Appends to `RUN/events.jsonl`; for rank 0.

    The file is copied anew at each start, so that a stale start which still has the old one open writes into nothing.
    Raises OSError where that fails; a line that cannot be written later is left out.
    """

    def __init__(self, folder: Path, fence: Fence) -> None:
        self._fence, self._host = fence, socket.gethostname()
        path = folder / EVENTS_FILE
        self.last_ending = _last_ending(path)
        fence.check()
        temporary = path.with_name(f".{EVENTS_FILE}.{fence.token.name}")
        if path.exists():
            shutil.copyfile(path, temporary)
        self._file = temporary.open("a", encoding="utf-8")
        os.replace(temporary, path)

    def write(self, event: str, *, step: int, **values: Any) -> None:
        """Record an event. Raises FencedError if the folder belongs to another start now."""
        self._fence.check_often()
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": now, "event": event, "start": self._fence.token.number, "step": step, "host": self._host
        }  # fmt: skip
        with contextlib.suppress(OSError, ValueError):
            self._file.write(json.dumps(line | values, ensure_ascii=False, default=str) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Idempotent."""
        with contextlib.suppress(OSError):
            self._file.close()


def _last_ending(path: Path) -> str | None:
    """How the last start ended; None if there was none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    for text in reversed(lines):
        try:
            found = json.loads(text)
            if found["event"] == "ended":
                return str(found["reason"])
            return f"without a word, at step {found['step']}: killed, or its node was lost"
        except (ValueError, KeyError, TypeError):
            continue  # the line a dying process was writing
    return None
