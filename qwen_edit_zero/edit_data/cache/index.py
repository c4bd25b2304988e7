"""The index over all shards of a folder: key -> where the tensor lies. Made from the shards, so it can be made again.

`index/ID/` is named by the shards it covers (names, sizes, struck entries), and is never changed: a run maps the one
that fits, or rank 0 makes it, from an older one where only shards were added.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import xxhash

from qwen_edit_zero.edit_data.cache.shard import BAD, RECORD, SUFFIX, read_records
from qwen_edit_zero.edit_data.cache.sorted_table import (
    Keys,
    Records,
    SortedTable,
    as_keys,
    merged,
    write_in_parts,
)

ENTRY = np.dtype([("shard", "<u4"), ("record", RECORD)])
_SHARDS = "shards.json"
_THREADS = 8
_SCANNED = 1 << 18

ShardList = dict[str, tuple[int, int]]  # name -> bytes of the shard, bytes of the list of struck entries


class EntryIndex:
    """An open index.

    Attributes:
        table: its records are of type ENTRY.
        shards: names of shard files; an entry's `shard` is a position here.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self.table = SortedTable(folder, ENTRY)
        self.shards: list[str] = list(_listed(folder)) if folder else []


def list_shards(folder: Path) -> ShardList:
    """The sealed shards of a folder, sorted by name."""
    found: dict[str, int] = {}
    struck: dict[str, int] = {}
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith((SUFFIX, BAD)) and not entry.name.startswith("."):
                with contextlib.suppress(FileNotFoundError):
                    target = found if entry.name.endswith(SUFFIX) else struck
                    target[entry.name] = entry.stat().st_size
    return {name: (found[name], struck.get(name.removesuffix(SUFFIX) + BAD, 0)) for name in sorted(found)}


def make_index(shards_folder: Path, indexes: Path) -> Path | None:
    """The index of the shards there are now, made if there is none yet; None without shards. For rank 0.

    Shards that cannot be read are left out: what they held counts as missing and is made again.

    Raises OSError if it cannot be written.
    """
    there = list_shards(shards_folder)
    if not there:
        return None
    text = json.dumps(there)
    folder = indexes / xxhash.xxh3_128_hexdigest(text.encode())
    if folder.exists():  # asked first: what another job gives this name from now on is whole
        if _opened(folder) is not None:
            return folder
        shutil.rmtree(folder, ignore_errors=True)  # damaged, as by a node that went down
    base = _largest_part(indexes, there) or EntryIndex(None)
    names = list(base.shards)
    pieces: list[Records] = []
    known = set(names)
    added = [name for name in there if name not in known]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="index") as pool:
        for name, found in zip(added, pool.map(lambda n: _readable(shards_folder / n), added), strict=True):
            piece = np.zeros(len(found), ENTRY)
            piece["shard"], piece["record"] = len(names), found
            names.append(name)
            pieces.append(piece)
    new = np.concatenate(pieces) if pieces else np.zeros(0, ENTRY)
    del pieces

    def scanned() -> Iterator[tuple[Keys, Records]]:
        for at in range(0, len(new), _SCANNED):
            part = new[at : at + _SCANNED]
            yield as_keys(part["record"]["key"]), part

    covered = json.dumps({name: there[name] for name in names})
    return write_in_parts(folder, ENTRY, merged(base.table, scanned, len(new)), {_SHARDS: covered})


def delete_other_indexes(indexes: Path, keep: Path | None) -> None:
    """Delete indexes that are not in use. Only for who is alone with the cache."""
    with contextlib.suppress(FileNotFoundError):
        for folder in indexes.iterdir():
            if folder != keep:
                shutil.rmtree(folder, ignore_errors=True)


def _readable(shard: Path) -> Records:
    try:
        return read_records(shard)
    except (OSError, ValueError):
        return np.zeros(0, RECORD)


def _largest_part(indexes: Path, there: ShardList) -> EntryIndex | None:
    """The index that covers most of these shards, and nothing that is not there or not the same any more."""
    best, most = None, 0
    with contextlib.suppress(FileNotFoundError):
        for folder in indexes.glob("[!.]*"):
            with contextlib.suppress(OSError, ValueError):
                covered = _listed(folder)
                fits = all(there.get(name) == found for name, found in covered.items())
                if fits and len(covered) > most and (index := _opened(folder)) is not None:
                    best, most = index, len(covered)
    return best


def _opened(folder: Path) -> EntryIndex | None:
    """An index, if it is there and can be used."""
    try:
        return EntryIndex(folder)
    except (OSError, ValueError):
        return None


def _listed(folder: Path) -> ShardList:
    return {name: (a, b) for name, (a, b) in json.loads((folder / _SHARDS).read_text(encoding="utf-8")).items()}
