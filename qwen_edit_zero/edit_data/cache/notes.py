"""What was found out about content or files, noted as records of a fixed size and found again by 16 bytes.

    FOLDER/tables/ID/     sorted, memory-mapped (`sorted_table`)
    FOLDER/new/ID.notes   appended by one process, whole records only; taken into a new table by the next start

Notes save time and nothing depends on them: what cannot be written is forgotten.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.edit_data.cache.locks import create_locked, is_abandoned, waited_lock
from qwen_edit_zero.edit_data.cache.ranks import Ranks
from qwen_edit_zero.edit_data.cache.sorted_table import (
    IN_A_PART,
    Keys,
    Records,
    SortedTable,
    as_keys,
    merged,
    write_in_parts,
)

_IN_A_PART = IN_A_PART
_SCANNED = 1 << 18


class Notes:
    """Opens the notes of a folder, and adds to them. Collective at its beginning; a context manager.

    Args:
        folder: need not exist. If it cannot be written, this is a memory of nothing new.
        record: the type of a record.
        alone: nobody else uses the folder: tables no longer wanted are deleted.
    """

    ENDING = ".notes"

    def __init__(self, folder: Path, record: np.dtype[np.void], ranks: Ranks, *, alone: bool = False) -> None:
        self._folder, self._record = folder, record
        self._noted = np.dtype([("key", np.uint8, 16), ("record", record)])
        self._fd: int | None = None
        table: Path | None = None
        if ranks.first:
            table = self._newest_table(alone=alone)
        self._table = SortedTable(ranks.from_first((table,))[0], record)

    def __len__(self) -> int:
        return len(self._table)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def look_up(self, keys: Keys) -> tuple[npt.NDArray[np.bool_], Records]:
        """(whether there is a record of each of these keys, the records; zeros where there is none)."""
        at = self._table.find(keys)
        records = np.zeros(len(keys), self._record)
        there = at >= 0
        records[there] = self._table.records[at[there]]
        return there, records

    def add(self, keys: npt.NDArray[np.uint8], records: Records) -> None:
        """Append records with their keys, (n, 16) bytes."""
        if not len(keys):
            return
        noted = np.zeros(len(keys), self._noted)
        noted["key"], noted["record"] = keys, records
        with contextlib.suppress(OSError):
            if self._fd is None:
                new = self._folder / "new"
                new.mkdir(parents=True, exist_ok=True)
                _, self._fd = create_locked(new, self.ENDING)
            written = os.write(self._fd, noted.tobytes())
            if torn := written % noted.itemsize:  # the disk is full; behind part of a record none would be found
                end = os.lseek(self._fd, -torn, os.SEEK_CUR)
                os.ftruncate(self._fd, end)

    def close(self) -> None:
        """End noting. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _newest_table(self, *, alone: bool) -> Path | None:
        """The table of all notes, made anew if ended processes left some; None if there are none or no right to it."""
        # Two that made a table at once, each of what it took, would leave out what the other one took.
        with waited_lock(self._folder / ".merging"):
            tables = self._folder / "tables"
            newest = self._last(tables)
            taken: list[tuple[int, Path]] = []
            try:
                for path in sorted((self._folder / "new").glob(f"*{self.ENDING}")):
                    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
                    if is_abandoned(fd, path):
                        taken.append((fd, path))
                    else:
                        os.close(fd)
                if taken:
                    newest = self._merge(tables, newest, [path for _, path in taken])
                    for _, path in taken:
                        path.unlink()
                if alone:
                    for other in tables.glob("*"):
                        if other != newest:
                            shutil.rmtree(other, ignore_errors=True)
            except OSError:
                pass
            finally:
                for fd, _ in taken:
                    os.close(fd)
            return newest

    def _merge(self, tables: Path, base: Path | None, added: list[Path]) -> Path:
        """A table of `base` and of these files; of records with one key that of the newest file counts."""
        number = int(base.name.split("-")[0]) + 1 if base is not None else 0
        path = tables / f"{number:08d}-{uuid.uuid4().hex[:8]}"
        news = [self._mapped(path) for path in sorted(added, key=lambda p: p.stat().st_mtime_ns)]

        def pieces() -> Iterator[tuple[Keys, Records]]:
            for new in news:
                for at in range(0, len(new), _SCANNED):
                    part = np.array(new[at : at + _SCANNED])
                    yield as_keys(part["key"]), part["record"]

        count = sum(map(len, news))
        parts = merged(SortedTable(base, self._record), pieces, count, in_a_part=_IN_A_PART)
        return write_in_parts(path, self._record, parts)

    def _mapped(self, path: Path) -> Records:
        """The whole records of a file of new notes."""
        count = path.stat().st_size // self._noted.itemsize
        return np.memmap(path, self._noted, "r", shape=(count,)) if count else np.zeros(0, self._noted)

    def _last(self, tables: Path) -> Path | None:
        """The newest table that can be opened."""
        for folder in sorted(tables.glob("[!.]*"), reverse=True):
            try:
                SortedTable(folder, self._record)
            except (OSError, ValueError):
                continue
            return folder
        return None
