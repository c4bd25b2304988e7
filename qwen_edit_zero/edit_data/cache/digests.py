"""Content digests of picture files, remembered by file status so that an unchanged file is not read again."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TextIO

from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError

_Status = tuple[int, int, int, int]
_TOO_YOUNG_NS = 2_000_000_000  # a file this young may change again without its time stamps showing it


def content_digest(path: Path) -> str:
    """32 hex digits of BLAKE2b over the bytes of a file. Raises DataError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()
    except OSError as error:
        raise DataError(f"picture {shown(path)}: it cannot be read ({error.strerror or error})") from error


class DigestMemo:
    """Digests kept in a folder of append-only files, one a writer; reading takes all files into account.

    A digest counts as long as size, inode, modification and change time of its file stay what they were.

    Args:
        folder: where the files lie; made if missing. A folder that cannot be written makes this a plain computation.
        writer: name of this process's file, unique among those that write at the same time.
        wanted: only digests of these paths are held in memory.
    """

    def __init__(self, folder: Path, *, writer: str, wanted: Iterable[Path]) -> None:
        self._known: dict[str, tuple[_Status, str]] = {}
        names = {os.path.abspath(path) for path in wanted}
        for file in sorted(folder.glob("*.jsonl")):
            self._load(file, names)
        self._file: TextIO | None = None
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = (folder / f"{writer}.jsonl").open("a", encoding="utf-8", errors="surrogateescape")
        except OSError:
            pass

    def __enter__(self) -> DigestMemo:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file:
            self._file.close()

    def digest(self, path: Path) -> str:
        """As `content_digest`, without reading the file if it is unchanged. May be called from several threads."""
        name = os.path.abspath(path)
        try:
            before = _status(name)
        except OSError as error:
            raise DataError(f"picture {shown(path)}: it cannot be read ({error.strerror or error})") from error
        known = self._known.get(name)
        if known and known[0] == before:
            return known[1]
        digest = content_digest(path)
        if self._file and time.time_ns() - max(before[2], before[3]) > _TOO_YOUNG_NS:
            self._known[name] = (before, digest)
            self._file.write(json.dumps([name, *before, digest]) + "\n")
        return digest

    def _load(self, file: Path, wanted: set[str]) -> None:
        with file.open(encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                try:
                    name, size, inode, modified, changed, digest = json.loads(line)
                except ValueError:
                    continue  # the line a dying process was writing
                if name in wanted:
                    self._known[name] = ((size, inode, modified, changed), digest)


def _status(name: str) -> _Status:
    status = os.stat(name)
    return status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns
