"""What was measured of contents, remembered in the cache folder: an unchanged picture is decoded once, by any check.

CACHE/check/looks/   of pictures, by content   (`looks`)
            masks/   of masks, by content
            pairs/   of a reference and a target, by both contents   (`pairs`)
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from qwen_edit_zero.edit_data.cache.notes import Notes
from qwen_edit_zero.edit_data.cache.ranks import Ranks
from qwen_edit_zero.edit_data.cache.sorted_table import as_keys
from qwen_edit_zero.edit_data.check.looks import LOOK, LOOKS_VERSION
from qwen_edit_zero.edit_data.check.pairs import PAIR, PAIRS_VERSION
from qwen_edit_zero.edit_data.pictures.decode import RULES_VERSION

_MOST_HELD = 1 << 16  # measures of this run that are at hand without being looked up
Measure = npt.NDArray[np.void]  # of shape ()


class Measures:
    """Measures of one kind: those that are known from before, and those of this process. Keys have 16 bytes.

    Raises nothing: what cannot be written is measured again the next time.
    """

    def __init__(self, folder: Path, record: np.dtype[np.void], version: int) -> None:
        self._notes = Notes(folder, record, Ranks())
        self._version = version * 1000 + RULES_VERSION  # pixels that are decoded otherwise measure otherwise
        self._at_hand: dict[bytes, Measure] = {}
        self._new: list[tuple[bytes, Measure]] = []
        self._record = record

    def fetch(self, keys: list[bytes]) -> None:
        """Have what is known of these keys at hand: asked for together, they are found fast."""
        asked = [key for key in dict.fromkeys(keys) if key not in self._at_hand]
        if len(self._at_hand) + len(asked) > _MOST_HELD:
            self._at_hand.clear()
            asked = list(dict.fromkeys(keys))
        if not asked:
            return
        there, records = self._notes.look_up(as_keys(np.frombuffer(b"".join(asked), np.uint8).reshape(-1, 16)))
        for i in np.flatnonzero(there & (records["version"] == self._version)).tolist():
            self._at_hand[asked[i]] = records[i : i + 1].reshape(())

    def get(self, key: bytes) -> Measure | None:
        """A measure that is at hand."""
        return self._at_hand.get(key)

    def put(self, key: bytes, measure: Measure) -> None:
        """A new one; `save` writes it."""
        measure["version"] = self._version
        self._at_hand[key] = measure
        self._new.append((key, measure))

    def save(self) -> None:
        """Write what is new."""
        if self._new:
            keys = np.frombuffer(b"".join(key for key, _ in self._new), np.uint8).reshape(-1, 16)
            self._notes.add(keys, np.array([measure for _, measure in self._new], self._record))
            self._new.clear()

    def close(self) -> None:
        """Write what is new, and nothing more. Idempotent."""
        self.save()
        self._notes.close()


class Memory:
    """All measures, of `cache`."""

    def __init__(self, cache: Path) -> None:
        folder = cache / "check"
        self.looks = Measures(folder / "looks", LOOK, LOOKS_VERSION)
        self.masks = Measures(folder / "masks", LOOK, LOOKS_VERSION)
        self.pairs = Measures(folder / "pairs", PAIR, PAIRS_VERSION)

    def save(self) -> None:
        """Write what is new."""
        for measures in (self.looks, self.masks, self.pairs):
            measures.save()

    def close(self) -> None:
        """Write what is new, and nothing more. Idempotent."""
        for measures in (self.looks, self.masks, self.pairs):
            measures.close()


def pair_key(reference: bytes, target: bytes, align: str) -> bytes:
    """Of a pair by its digests; `align` decides which parts of the two show one frame."""
    return xxhash.xxh3_128_digest(reference + target + align.encode())
