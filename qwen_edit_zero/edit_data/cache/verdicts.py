"""What the user's classifier has said of rows, kept in the cache folder: a row is asked about once, by any process.

CACHE/verdicts/fine/    rows of which it said nothing
               found/   rows that it would flag or block, and why
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from qwen_edit_zero.edit_data.cache.notes import Notes
from qwen_edit_zero.edit_data.cache.ranks import Ranks
from qwen_edit_zero.edit_data.cache.sorted_table import as_keys
from qwen_edit_zero.edit_data.cache.survey import Chunk
from qwen_edit_zero.edit_data.instructions.judging import RowJudge
from qwen_edit_zero.edit_data.instructions.safety import Finding, Level
from qwen_edit_zero.edit_data.manifests.samples import Sample

FOLDER = "verdicts"
_MOST_BYTES = 500  # of a reason
_FINE = np.dtype([("fine", "u1")])  # a byte a row, of all rows of most sets
_FOUND = np.dtype([("level", "u1"), ("reason", f"S{_MOST_BYTES}")])
_LEVELS: tuple[Level, ...] = ("flag", "block")


class Verdicts:
    """Opens the verdicts of a cache, and keeps new ones. Collective at its beginning.

    What cannot be written is asked again the next time.

    Args:
        folder: of the cache.
        alone: nobody else uses the cache.
    """

    def __init__(self, folder: Path, ranks: Ranks, *, alone: bool = False) -> None:
        self._fine = Notes(folder / FOLDER / "fine", _FINE, ranks, alone=alone)
        self._found = Notes(folder / FOLDER / "found", _FOUND, ranks, alone=alone)

    def known(self, judge: RowJudge, keys: Sequence[bytes]) -> dict[bytes, Finding | None]:
        """What was said of those of these keys (`RowJudge.key`) that have been asked about."""
        if not keys:
            return {}
        asked = as_keys(np.frombuffer(b"".join(keys), np.uint8).reshape(-1, 16))
        said: dict[bytes, Finding | None] = {}
        for i in np.flatnonzero(self._fine.look_up(asked)[0]).tolist():
            said[keys[i]] = None
        there, records = self._found.look_up(asked)
        for i in np.flatnonzero(there).tolist():
            reason = records["reason"][i].decode("utf-8", "ignore")
            said[keys[i]] = judge.finding(_LEVELS[int(records["level"][i])], reason)
        return said

    def ask(self, judge: RowJudge, key: bytes, sample: Sample) -> Finding | None:
        """Ask about a row, and keep what is said at once. Raises RunError if the classifier fails."""
        found = judge.ask(sample.instruction, (*sample.sources, sample.target))
        keys = np.frombuffer(key, np.uint8).reshape(1, 16)
        if found is None:
            self._fine.add(keys, np.ones(1, _FINE))
            return None
        reason = found.found.encode("utf-8", "replace")[:_MOST_BYTES].decode("utf-8", "ignore")
        record = np.zeros(1, _FOUND)
        record["level"], record["reason"] = _LEVELS.index(found.level), reason.encode()
        self._found.add(keys, record)
        return replace(found, found=reason)  # as it will be told of the row from now on

    def close(self) -> None:
        """End keeping. Idempotent."""
        self._fine.close()
        self._found.close()


def keys_of(judge: RowJudge, chunk: Chunk, rows: Sequence[int]) -> list[bytes]:
    """The keys of some rows of a chunk, all of whose pictures are known."""
    keys = []
    for row in rows:
        sample, digests = chunk.samples[row], [digest.tobytes() for digest in chunk.digests[row]]
        keys.append(judge.key(sample.instruction, [*digests[1 : 1 + len(sample.source_names)], digests[0]]))
    return keys
