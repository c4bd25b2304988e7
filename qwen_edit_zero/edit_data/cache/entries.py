"""Entries of one kind, made by one version of the frozen models: a folder of shards, their index, and reading from it.

KIND-FINGERPRINT/about.json      what made them, in words
                 shards/         sealed shards, and partial ones being written
                 index/ID/       see `index`
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import threading
import uuid
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

from qwen_edit_zero.edit_data.cache.columns import wait_for
from qwen_edit_zero.edit_data.cache.index import EntryIndex, delete_other_indexes, make_index
from qwen_edit_zero.edit_data.cache.ranks import Ranks
from qwen_edit_zero.edit_data.cache.shard import (
    DTYPES,
    PARTIAL,
    SHARD_BYTES,
    ShardWriter,
    adopt,
    checksum,
    shape_of,
    strike,
)
from qwen_edit_zero.edit_data.cache.sorted_table import Keys
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError

Kind = Literal["latent", "prompt", "mask"]
_MAPPED = 128  # shards mapped at once


@dataclass(frozen=True)
class EntryKind:
    """What is kept and what it depends on but the sample.

    Attributes:
        kind: latent, prompt or mask.
        about: everything but content that decides the values: fingerprints, areas, precision, versions.
    """

    kind: Kind
    fingerprint: str
    about: Mapping[str, object]

    @property
    def folder_name(self) -> str:
        """Of the entries, inside the cache."""
        return f"{self.kind}-{self.fingerprint}"


class Entries:
    """Opens the entries of one kind. Without an index there is none: see `refresh`. Reading is safe in many threads."""

    def __init__(self, cache: Path, kind: EntryKind) -> None:
        self.kind = kind
        self.folder = cache / kind.folder_name
        self.shards = self.folder / "shards"
        self._index = EntryIndex(None)
        self._compared = np.zeros(0, bool)
        self._maps: OrderedDict[int, mmap.mmap] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._index.table)

    def __getstate__(self) -> dict[str, object]:
        raise TypeError("entries are opened in the process that reads them")

    def refresh(self, ranks: Ranks, *, alone: bool = False) -> None:
        """Save what killed processes left, make the index of all shards there are, and map it. Collective.

        Args:
            alone: nobody else uses the cache (see `locks.CacheLock`): indexes no longer wanted are deleted.

        Raises:
            OSError: it cannot be written.
        """
        left = ranks.from_first(sorted(p.name for p in self.shards.glob(f"*{PARTIAL}")) if ranks.first else None)
        for name in left[ranks.rank :: ranks.size]:
            adopt(self.shards / name)
        ranks.wait()
        index: Path | None = None
        if ranks.first:
            index = make_index(self.shards, self.folder / "index")
            if alone:
                delete_other_indexes(self.folder / "index", index)
        self.open(ranks.from_first((index,))[0])

    def open(self, index: Path | None) -> None:
        """Map this index."""
        if index is not None:
            wait_for(index / "rest.npy")
        with self._lock:
            self._index = EntryIndex(index)
            self._compared = np.zeros(len(self._index.table), bool)
            self._maps.clear()

    def writer(self, shard_bytes: int = SHARD_BYTES) -> ShardWriter:
        """For new entries, which `refresh` shows once it is closed. Raises OSError."""
        self.folder.mkdir(parents=True, exist_ok=True)
        about = self.folder / "about.json"
        if not about.exists():
            temporary = about.with_name(f".about.{uuid.uuid4().hex}")
            temporary.write_text(json.dumps(self.kind.about, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            os.replace(temporary, about)
        return ShardWriter(self.shards, shard_bytes=shard_bytes)

    def missing(self, keys: Keys) -> npt.NDArray[np.bool_]:
        """Which of these keys have no entry."""
        return self._index.table.find(keys) < 0

    def first_sides(self, keys: Keys) -> npt.NDArray[np.int32]:
        """Length of the first dimension of these entries' tensors, 0 where there is none: tokens of prompts."""
        at = self._index.table.find(keys)
        sides = np.zeros(len(keys), np.int32)
        sides[at >= 0] = self._index.table.records["record"]["shape"][at[at >= 0], 0]
        return sides

    def get(self, key: bytes) -> torch.Tensor:
        """The tensor of a key of 16 bytes: its bytes are mapped, and compared with their checksum at the first read.

        It is private to the caller's process, and lives in the page cache until something is written to it.

        Raises:
            DataError: the entry is gone or damaged. A damaged one is struck out, so that the next start makes it again.
        """
        at = self._index.table.find_one(key)
        if at < 0:
            raise DataError(
                f"cache {shown(self.folder)}: there is no entry {key.hex()}; start the run again, which computes what "
                "is missing"
            )
        entry = self._index.table.records[at]
        number, record = int(entry["shard"]), entry["record"]
        shard = self.shards / self._index.shards[number]
        offset, size = int(record["offset"]), int(record["size"])
        try:
            mapped = self._map(number, shard)
            if offset + size > len(mapped):
                raise OSError(5, f"the file has been cut to {len(mapped):,} bytes")
            if not self._compared[at]:
                begin = offset // mmap.PAGESIZE * mmap.PAGESIZE
                mapped.madvise(mmap.MADV_WILLNEED, begin, offset + size - begin)
        except (OSError, ValueError) as error:
            raise DataError(
                f"cache shard {shown(shard)} cannot be read ({getattr(error, 'strerror', None) or error}); start the "
                "run again, which computes what is missing"
            ) from error
        view = memoryview(mapped)[offset : offset + size]
        if not self._compared[at]:
            if checksum(view) != record["sum"].tobytes():
                with contextlib.suppress(OSError):
                    strike(shard, key)
                raise DataError(
                    f"cache shard {shown(shard)}: entry {key.hex()} is damaged and was struck out; start the run "
                    "again, which computes it anew"
                )
            self._compared[at] = True
        dtype = DTYPES[int(record["dtype"])][1]
        return torch.frombuffer(view, dtype=dtype).reshape(shape_of(record))

    def _map(self, number: int, shard: Path) -> mmap.mmap:
        """The mapped shard; those not used for long are let go (what was read from them keeps its own hold)."""
        with self._lock:
            found = self._maps.get(number)
            if found is None:
                with shard.open("rb") as file:
                    found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
                self._maps[number] = found
                if len(self._maps) > _MAPPED:
                    self._maps.popitem(last=False)
            self._maps.move_to_end(number)
            return found
