"""A small manifest as samples in memory, its pictures looked for; `opening.open_manifest` opens large ones."""

from __future__ import annotations

import hashlib
import json
import stat
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from pathlib import Path

from qwen_edit_zero.edit_data.manifests.names import RowError
from qwen_edit_zero.edit_data.manifests.opening import open_manifest
from qwen_edit_zero.edit_data.manifests.samples import OnError, Refusal, Sample, refuse_or_raise
from qwen_edit_zero.edit_data.wording import shown, why_missing

__all__ = ["Manifest", "OnError", "Refusal", "Sample", "dataset_fingerprint", "read_manifest", "refuse_or_raise"]


@dataclass(frozen=True)
class Manifest:
    """The samples of a manifest in its order, and the rows that were refused."""

    path: Path
    samples: tuple[Sample, ...]
    refused: tuple[Refusal, ...] = ()

    def __len__(self) -> int:
        return len(self.samples)

    def categories(self) -> dict[str, int]:
        """Number of samples a category, largest first; samples without one count as ""."""
        return dict(Counter(sample.category or "" for sample in self.samples).most_common())


def read_manifest(path: Path, *, max_references: int = 3, on_error: OnError = "stop") -> Manifest:
    """Read a manifest and look whether each picture it names is there.

    Args:
        path: a JSONL file; the names in it are relative to its folder.
        max_references: most reference pictures a sample may have.
        on_error: "stop" raises if any row is wrong, naming all (the first ten with reasons); "skip" leaves wrong rows
            out and lists them in `refused`. Nothing but the file and the disk decides, so every rank reads the same.

    Raises:
        DataError: the file cannot be read, is not UTF-8 JSONL, has wrong rows (under "stop"), or has no usable row.
    """
    table = open_manifest(path, max_references=max_references, on_error="skip")
    samples: list[Sample] = []
    refused = list(table.refused)
    for sample in table:
        try:
            for name in (*sample.source_names, sample.target_name):
                _check_there(path.parent, name)
        except RowError as error:
            refused.append(Refusal(sample.line, sample.id, str(error)))
        else:
            samples.append(sample)
    refused.sort(key=lambda refusal: refusal.line)
    refuse_or_raise(refused, left=len(samples), path=path, on_error=on_error)
    return Manifest(path, tuple(samples), tuple(refused))


def dataset_fingerprint(samples: Iterable[Sample], buckets: Iterable[Hashable] = ()) -> str:
    """32 hex digits over what decides which samples a step draws and what their rows say, in order; no picture is read.

    Two runs with the same fingerprint, seed and global batch size draw the same samples at every step. Names count as
    written in the manifest, so that a data set may move. `buckets` are those of the samples, by their `repr`.
    """
    digest = hashlib.blake2b(digest_size=16)
    for s in samples:
        row = [s.id, s.source_names, s.instruction, s.target_name, s.category, s.weight]
        digest.update(json.dumps(row).encode() + b"\n")
    for bucket in buckets:
        digest.update(repr(bucket).encode() + b"\n")
    return digest.hexdigest()


def _check_there(root: Path, name: str) -> None:
    try:
        mode = (root / name).stat().st_mode
    except OSError:
        raise RowError(f"picture {shown(name)} is not there: {why_missing(root, name)}") from None
    except UnicodeEncodeError:
        raise RowError(
            f"picture {shown(name)} cannot be looked up in this locale; run with PYTHONUTF8=1 or a UTF-8 locale"
        ) from None
    if stat.S_ISDIR(mode):
        raise RowError(f"picture {shown(name)} is a folder")
    if not stat.S_ISREG(mode):
        raise RowError(f"picture {shown(name)} is not a regular file")
