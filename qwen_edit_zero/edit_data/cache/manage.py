"""Looking after a cache folder: what is in it, whether it is whole, and deleting what nobody wants."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qwen_edit_zero.edit_data.cache.entries import Kind
from qwen_edit_zero.edit_data.cache.index import list_shards
from qwen_edit_zero.edit_data.cache.locks import CacheLock
from qwen_edit_zero.edit_data.cache.shard import (
    DTYPES,
    INDEX,
    PARTIAL,
    RECORD,
    Records,
    ShardWriter,
    delete_shard,
    is_whole,
    read_records,
    shape_of,
    strike,
    struck_keys,
)
from qwen_edit_zero.edit_data.cache.sorted_table import Keys, SortedKeys, as_keys
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError

KINDS: tuple[Kind, ...] = ("latent", "prompt", "mask")
OnBytes = Callable[[int, int], None]


@dataclass
class KindFolder:
    """Entries of one kind and make, as they lie on disk.

    Attributes:
        about: what made them.
        entries: in sealed shards; those that are there twice count twice.
        size: bytes of all files.
    """

    folder: Path
    kind: Kind
    about: Mapping[str, Any]
    entries: int = 0
    shards: list[Path] = field(default_factory=list)
    partial: int = 0
    size: int = 0

    @property
    def name(self) -> str:
        """Of the folder."""
        return self.folder.name


def kind_folders(cache: Path) -> list[KindFolder]:
    """What a cache holds, largest first. Raises DataError if it is no cache."""
    if not cache.is_dir():
        raise DataError(
            f"cache folder {shown(cache)}: there is no such folder; data.cache_dir or run.dir names another"
        )
    found = []
    for folder in sorted(cache.iterdir()):
        kind = next((kind for kind in KINDS if folder.name.startswith(f"{kind}-") and folder.is_dir()), None)
        if kind is None:
            continue
        try:
            about = json.loads((folder / "about.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            about = {}
        made = KindFolder(folder, kind, about, size=size_of(folder))
        made.shards = [folder / "shards" / name for name in list_shards(folder / "shards")]
        made.partial = len(list((folder / "shards").glob(f"*{PARTIAL}")))
        for shard in made.shards:
            try:
                made.entries += len(read_records(shard))
            except (OSError, ValueError):
                continue  # `verify` says so
        found.append(made)
    return sorted(found, key=lambda made: -made.size)


def size_of(folder: Path) -> int:
    """Bytes of all files under a folder."""
    total = 0
    for where, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(where, name)).st_blocks * 512  # holes take nothing
            except OSError:
                continue
    return total


def verify(cache: Path, *, repair: bool, on_bytes: OnBytes = lambda done, total: None) -> list[str]:
    """Read every entry and compare it with its checksum; returns what is damaged, a line each.

    Args:
        repair: strike damaged entries out and delete shards that are nothing but damage, so that the next job makes
            them again.
        on_bytes: is told how many bytes of how many have been read.
    """
    shards = [shard for made in kind_folders(cache) for shard in made.shards]
    total, done = sum(shard.stat().st_size for shard in shards), 0
    problems: list[str] = []
    for shard in shards:
        name = f"{shard.parent.parent.name}/{shard.parent.name}/{shard.name}"
        size = shard.stat().st_size
        try:
            records = read_records(shard)
            lost = _promised(shard) - len(records)
            bad = _bad_records(shard, records, partial(_shifted, on_bytes, done, total))
        except (OSError, ValueError) as error:
            problems.append(f"{name}: it cannot be read ({error})")
            if repair:
                delete_shard(shard)
        else:
            if lost:
                problems.append(f"{name}: it is cut short, and {lost} of its entries are gone")
            problems += [f"{name}: entry {key.hex()} is damaged" for key in bad]
            if repair and (lost or bad) and len(bad) == len(records):
                delete_shard(shard)
            elif repair:
                for key in bad:
                    strike(shard, key)
                if lost:
                    shard.with_suffix(INDEX).write_bytes(records.tobytes())
        done += size
        on_bytes(done, total)
    return problems


def _shifted(on_bytes: OnBytes, before: int, total: int, more: int) -> None:
    on_bytes(before + more, total)


def _promised(shard: Path) -> int:
    """Entries that a shard should have, less those struck out; what is known without its index file is all there is."""
    try:
        data = shard.with_suffix(INDEX).read_bytes()
    except FileNotFoundError:
        return len(read_records(shard))
    listed = np.frombuffer(data[: len(data) // RECORD.itemsize * RECORD.itemsize], RECORD)
    struck = struck_keys(shard)
    return sum(record["key"].tobytes() not in struck for record in listed)


def _bad_records(shard: Path, records: Records, on_read: Callable[[int], None]) -> list[bytes]:
    bad, read = [], 0
    fd = os.open(shard, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for record in records:
            if not is_whole(fd, record):
                bad.append(record["key"].tobytes())
            read += int(record["size"])
            on_read(read)
    finally:
        os.close(fd)
    return bad


@dataclass
class Pruning:
    """What pruning would do, or did.

    Attributes:
        kept, deleted: entries.
        freed: bytes.
        folders: kinds and makes that no recipe uses at all.
    """

    kept: int = 0
    deleted: int = 0
    freed: int = 0
    folders: list[KindFolder] = field(default_factory=list)


def prune(cache: Path, used: Mapping[str, Keys], *, delete: bool) -> Pruning:
    """Find, and delete, entries that are not used.

    A shard with something that is not used is written anew without it.

    Args:
        used: by folder of a kind and make, the keys that are used; folders that are not named are not used at all.
        delete: if not, nothing is changed.

    Raises:
        DataError: a job uses the cache.
        OSError: it cannot be written.
    """
    with CacheLock(cache, exclusive=True) as lock:
        if delete and not lock.alone:
            raise DataError(
                f"cache folder {shown(cache)}: a job is using it (or this file system has no locks), and its entries "
                "may be those that would be deleted; prune when it has ended"
            )
        pruning = Pruning()
        for made in kind_folders(cache):
            if made.name not in used:
                pruning.folders.append(made)
                pruning.deleted += made.entries
                pruning.freed += made.size
                if delete:
                    shutil.rmtree(made.folder)
                continue
            _prune_folder(made, used[made.name], pruning, delete)
        return pruning


def _prune_folder(made: KindFolder, used: Keys, pruning: Pruning, delete: bool) -> None:
    wanted = SortedKeys.of(used)
    seen = np.zeros(len(wanted) + 1, np.bool_)  # the last is that of -1
    changed = False
    for shard in made.shards:
        try:
            records = read_records(shard)
        except (OSError, ValueError):
            records = np.zeros(0, RECORD)
        at = wanted.find(as_keys(records["key"]))
        keep = np.zeros(len(records), np.bool_)
        keep[np.unique(at, return_index=True)[1]] = True  # one of several that are alike
        keep &= (at >= 0) & ~seen[at]
        seen[at[keep]] = True
        pruning.kept += int(keep.sum())
        pruning.deleted += len(records) - int(keep.sum())
        freed = shard.stat().st_size - int(records["size"][keep].sum()) if not keep.all() or not len(records) else 0
        pruning.freed += freed
        if delete and freed:
            changed = True
            if keep.any():
                _copy(shard, records[keep])
            delete_shard(shard)
    if changed:
        shutil.rmtree(made.folder / "index", ignore_errors=True)


def _copy(shard: Path, records: Records) -> None:
    """Write these entries to a new shard."""
    fd = os.open(shard, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with ShardWriter(shard.parent) as writer:
            for record in records:
                if not is_whole(fd, record):
                    continue  # it is missing from now on, and made again when it is wanted
                data = bytearray(os.pread(fd, int(record["size"]), int(record["offset"])))
                tensor = torch.frombuffer(data, dtype=DTYPES[int(record["dtype"])][1]).reshape(shape_of(record))
                writer.put(record["key"].tobytes(), tensor)
    finally:
        os.close(fd)
