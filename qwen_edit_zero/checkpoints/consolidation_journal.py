"""What an interrupted consolidation had finished, so that the next one goes on instead of starting over."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from qwen_edit_zero.checkpoints.consolidation_output import OutputFile

JOURNAL = ".journal"


class Journal:
    """Numbers of finished parts, one a line, below a line that says what is being written from what.

    A number is written only after the part's bytes are on the disk; a last line without its end does not count.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self.done: set[int] = set()
        self._path = folder / JOURNAL
        lines = self._lines()
        if lines[:1] == [identity]:
            self.done = {int(line) for line in lines[1:]}
            self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            os.ftruncate(self._fd, sum(len(line) + 1 for line in lines))  # a line that was cut off goes
        else:
            self._fd = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
            os.write(self._fd, f"{identity}\n".encode())

    @staticmethod
    def is_of(folder: Path, identity: str) -> bool:
        """Whether this folder was left by a consolidation of the same source into the same files."""
        try:
            with (folder / JOURNAL).open("rb") as file:
                return file.readline() == f"{identity}\n".encode()
        except OSError:
            return False

    def add(self, parts: Iterable[int]) -> None:
        """Note finished parts, whose bytes must be on the disk."""
        os.write(self._fd, "".join(f"{part}\n" for part in parts).encode())
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def remove(self) -> None:
        """Delete it: everything is written."""
        self._path.unlink()

    def _lines(self) -> list[str]:
        try:
            content = self._path.read_bytes().decode("ascii", errors="replace")
        except OSError:
            return []
        return content.split("\n")[:-1]


def identity_of(source: str, files: Sequence[OutputFile]) -> str:
    """A digest of what is written from what: equal only if parts of one run can be kept by another."""
    digest = hashlib.blake2b(source.encode(), digest_size=16)
    for file in files:
        parts = [[p.start, p.length] for tensor, _ in file.tensors for p in tensor.parts]
        digest.update(json.dumps([file.name, file.size, parts]).encode() + file.header)
    return digest.hexdigest()
