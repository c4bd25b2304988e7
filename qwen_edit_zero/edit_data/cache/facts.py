"""What is known of picture files (content digest, size in pixels), so that an unchanged file is never read twice.

A fact counts as long as the stamp of its file stays what it was: size and what changes whenever content may have. Facts
lie in the cache folder, where `data check`, `cache` and training find them:

    facts/tables/ID/      sorted, memory-mapped (`sorted_table`)
    facts/new/ID.facts    appended by one process; taken into a new table by the next start
"""

from __future__ import annotations

import contextlib
import os
import shutil
import uuid
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt
import xxhash

from qwen_edit_zero.edit_data.cache.locks import is_abandoned, try_lock
from qwen_edit_zero.edit_data.cache.ranks import Ranks
from qwen_edit_zero.edit_data.cache.sorted_table import Keys, SortedTable, as_keys, write_table

DECODED = 1  # flag: all pixels were decoded without complaint, not only the header read

FACT = np.dtype(
    [
        ("stamp", "<u8"),
        ("digest", np.uint8, 16),  # BLAKE2b of the content
        ("width", "<i4"),  # of the upright picture
        ("height", "<i4"),
        ("rules", "<u2"),  # version of the rules for headers by which the size was read
        ("flags", "u1"),
        ("unused", "u1"),
    ]
)
FactArray = npt.NDArray[np.void]
NAMED_FACT = np.dtype([("name", np.uint8, 16), ("fact", FACT)])


def name_key(name: str) -> bytes:
    """16 bytes for the whole name of a file."""
    return xxhash.xxh3_128_digest(name.encode("utf-8", "surrogatepass"))


class Facts:
    """Opens the facts of a cache, and notes new ones. Collective at its beginning; a context manager.

    A folder that cannot be written makes this a memory of nothing.

    Args:
        folder: `facts` of a cache.
        alone: nobody else uses the cache: tables no longer wanted are deleted.
    """

    def __init__(self, folder: Path, ranks: Ranks, *, alone: bool = False) -> None:
        self._folder = folder
        self._fd: int | None = None
        table: Path | None = None
        if ranks.first:
            table = _newest_table(folder, alone=alone)
        self._table = SortedTable(ranks.from_first((table,))[0], FACT)

    def __len__(self) -> int:
        return len(self._table)

    def __enter__(self) -> Facts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def find(
        self, names: Keys, stamps: npt.NDArray[np.uint64], *, rules: int
    ) -> tuple[npt.NDArray[np.bool_], FactArray]:
        """(whether each of these files is known with this stamp, its fact; only where known)."""
        at = self._table.find(names)
        facts = np.zeros(len(names), FACT)
        there = at >= 0
        facts[there] = self._table.records[at[there]]
        return there & (facts["stamp"] == stamps) & (facts["rules"] == rules), facts

    def note(self, facts: FactArray) -> None:
        """Append records of type NAMED_FACT. What cannot be written is forgotten."""
        if not len(facts):
            return
        with contextlib.suppress(OSError):
            if self._fd is None:
                new = self._folder / "new"
                new.mkdir(parents=True, exist_ok=True)
                self._fd = os.open(
                    new / f"{uuid.uuid4().hex}.facts",
                    os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC,
                    0o666,
                )
                try_lock(self._fd)
            os.write(self._fd, facts.tobytes())

    def close(self) -> None:
        """End noting. Idempotent."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _newest_table(folder: Path, *, alone: bool) -> Path | None:
    """The table of all facts, made anew if processes that have ended left some; None if there are none or no right."""
    tables = folder / "tables"
    newest = _last(tables)
    taken: list[tuple[int, Path]] = []
    try:
        for path in sorted((folder / "new").glob("*.facts")):
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            if is_abandoned(fd, path):
                taken.append((fd, path))
            else:
                os.close(fd)
        if taken:
            newest = _merge(tables, newest, [path for _, path in taken])
            for _, path in taken:
                path.unlink()
        if alone:
            for other in tables.glob("*"):
                if other != newest:
                    shutil.rmtree(other, ignore_errors=True)
    except OSError:
        pass  # facts save time, and a cache may be read-only
    finally:
        for fd, _ in taken:
            os.close(fd)
    return newest


def _merge(tables: Path, base: Path | None, added: list[Path]) -> Path:
    """A table with the facts of `base` and of these files; the newest file's count where one name is in several."""
    names, facts = [], []
    if base is not None:
        table = SortedTable(base, FACT)
        names.append(table.keys)
        facts.append(np.array(table.records))
    for path in sorted(added, key=lambda p: p.stat().st_mtime_ns):
        data = path.read_bytes()
        part = np.frombuffer(data[: len(data) // NAMED_FACT.itemsize * NAMED_FACT.itemsize], NAMED_FACT)
        names.append(as_keys(part["name"]))
        facts.append(part["fact"])
    number = int(base.name.split("-")[0]) + 1 if base is not None else 0
    return write_table(tables / f"{number:08d}-{uuid.uuid4().hex[:8]}", np.concatenate(names), np.concatenate(facts))


def _last(tables: Path) -> Path | None:
    """The newest table that can be opened."""
    for folder in sorted(tables.glob("[!.]*"), reverse=True):
        try:
            SortedTable(folder, FACT)
        except (OSError, ValueError):
            continue
        return folder
    return None
