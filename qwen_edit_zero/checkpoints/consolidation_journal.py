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

    A number is written only after the part's bytes are on the disk. A line that is no number, as a power cut may leave
    one, does not count, nor do those after it.
    """

    def __init__(self, folder: Path, identity: str) -> None:
        self.path = folder / JOURNAL
        self.done: set[int] = set()
        self._identity = identity
        if self.is_of(folder, identity):
            self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            head, *lines = self.path.read_bytes().split(b"\n")[:-1]
            end = len(head) + 1
            for line in lines:
                if not line.isdigit():
                    break
                self.done.add(int(line))
                end += len(line) + 1
            os.ftruncate(self._fd, end)
        else:
            self._fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
            self._write([])

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

    def forget(self, parts: Iterable[int]) -> None:
        """Take parts out again, on the disk too, because their bytes are gone."""
        self.done.difference_update(parts)
        os.ftruncate(self._fd, 0)
        self._write(sorted(self.done))
        os.fdatasync(self._fd)

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _write(self, parts: Iterable[int]) -> None:
        os.write(self._fd, "".join(f"{line}\n" for line in [self._identity, *parts]).encode())


def identity_of(source: str, files: Sequence[OutputFile]) -> str:
    """A digest of what is written from what: equal only if parts of one run can be kept by another."""
    digest = hashlib.blake2b(source.encode(), digest_size=16)
    for file in files:
        parts = [[p.start, p.length] for tensor, _ in file.tensors for p in tensor.parts]
        digest.update(json.dumps([file.name, file.size, parts]).encode() + file.header)
    return digest.hexdigest()
