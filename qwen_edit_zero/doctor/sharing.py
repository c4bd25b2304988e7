"""Whether a folder is the same one on all nodes: one writes, all read, all write back.

Collective use, in this order: `ask` on rank 0; its answer to all nodes; `answer` on one rank of each node; `missing` on
rank 0 when all have answered; `clean` on rank 0.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

# A client of NFS may not look at the server again for so long; names that it never looked for are seen at once.
PATIENCE_SECONDS = 15.0
_QUESTION = "question"


@dataclass(frozen=True)
class Question:
    """A file that rank 0 has written, in a folder of its own; `error` if it could not."""

    folder: str
    token: str
    error: str = ""


@dataclass(frozen=True)
class Answer:
    """What a node found: after how long, or why not."""

    seconds: float = 0.0
    error: str = ""


class Asked:
    """Rank 0's side: a question in `folder`, which is made if need be, and how it was answered."""

    def __init__(self, folder: Path) -> None:
        self._made = _first_to_make(folder)
        token = uuid.uuid4().hex
        self._place = folder / f".doctor-{token[:12]}"
        error = ""
        try:
            self._place.mkdir(parents=True)
            _write(self._place / _QUESTION, token)
        except OSError as problem:
            error = f"cannot be written: {problem.strerror or problem}"
        self.question = Question(str(self._place), token, error)

    def missing(self, nodes: Sequence[int], *, patience: float = PATIENCE_SECONDS) -> list[int]:
        """Those of the numbered nodes whose answers cannot be seen here."""
        until = time.monotonic() + patience
        while True:
            with contextlib.suppress(OSError):
                there = set(os.listdir(self._place))
                left = [node for node in nodes if _name(node) not in there]
                if not left or time.monotonic() > until:
                    return left
            if time.monotonic() > until:
                return list(nodes)
            time.sleep(0.1)

    def clean(self) -> None:
        """Take everything away, folders that were made for it too if nothing else has come into them."""
        shutil.rmtree(self._place, ignore_errors=True)
        with contextlib.suppress(OSError):
            for folder in self._made:
                folder.rmdir()


def answer(question: Question, node: int, *, patience: float = PATIENCE_SECONDS) -> Answer:
    """Read what rank 0 wrote, and write back under the number of this node, by a rename."""
    if question.error:
        return Answer()
    place, began = Path(question.folder), time.monotonic()
    while True:
        fault = _read(place, question.token)
        waited = time.monotonic() - began
        if not fault or waited > patience:
            break
        time.sleep(0.1)
    if fault:
        return Answer(waited, fault)
    try:
        temporary = place / f"{_name(node)}.partial"
        _write(temporary, question.token)
        os.replace(temporary, place / _name(node))
    except OSError as error:
        return Answer(waited, f"cannot be written there: {error.strerror or error}")
    return Answer(waited)


def _name(node: int) -> str:
    return f"answer-{node}"


def _read(place: Path, token: str) -> str:
    """What is wrong with what is there; empty if it is the token."""
    try:
        for folder in (place.parent.parent, place.parent, place):  # to open a folder asks the server what is in it
            with contextlib.suppress(FileNotFoundError):
                os.scandir(folder).close()
        found = (place / _QUESTION).read_text(encoding="utf-8")
    except FileNotFoundError:
        return "is another folder there" if place.parent.is_dir() else "is not there"
    except OSError as error:
        return f"cannot be read there: {error.strerror or error}"
    return "" if found == token else "shows other bytes there"


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _first_to_make(folder: Path) -> list[Path]:
    """`folder` and those above it that are not there yet, the innermost first."""
    lacking = []
    while not folder.exists() and folder != folder.parent:
        lacking.append(folder)
        folder = folder.parent
    return lacking
