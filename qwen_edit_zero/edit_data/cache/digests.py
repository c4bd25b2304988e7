"""Content digests of picture files, remembered by file status so that an unchanged file is not read again."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TextIO

from qwen_edit_zero.edit_data.pictures.decode import MAX_BYTES
from qwen_edit_zero.edit_data.storage.files import PictureFile, as_file


def content_digest(file: PictureFile | Path) -> str:
    """32 hex digits of BLAKE2b over the bytes of a file. Raises DataError if it cannot be read."""
    return hashlib.blake2b(as_file(file).read(MAX_BYTES), digest_size=16).hexdigest()


class DigestMemo:
    """Digests kept in a folder of append-only files, one a writer; reading takes all files into account.

    A digest counts as long as the stamp of its file stays what it was.

    Args:
        folder: where the files lie; made if missing. A folder that cannot be written makes this a plain computation.
        writer: name of this process's file, unique among those that write at the same time.
        wanted: only digests of these files are held in memory.
    """

    def __init__(self, folder: Path, *, writer: str, wanted: Iterable[PictureFile | Path]) -> None:
        self._known: dict[str, tuple[tuple[int, str], str]] = {}
        names = {as_file(file).location for file in wanted}
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

    def digest(self, file: PictureFile | Path) -> str:
        """As `content_digest`, without reading the file if it is unchanged. May be called from several threads."""
        file = as_file(file)
        name, stamp = file.location, file.stamp()
        before = (stamp.size, stamp.version)
        known = self._known.get(name)
        if known and known[0] == before:
            return known[1]
        digest = content_digest(file)
        if self._file and stamp.is_settled():
            self._known[name] = (before, digest)
            self._file.write(json.dumps([name, *before, digest]) + "\n")
        return digest

    def _load(self, file: Path, wanted: set[str]) -> None:
        with file.open(encoding="utf-8", errors="surrogateescape") as lines:
            for line in lines:
                try:
                    name, size, version, digest = json.loads(line)
                except ValueError:
                    continue  # the line a dying process was writing
                if name in wanted:
                    self._known[name] = ((size, version), digest)
