"""Our manifest of edit samples: JSON Lines, one sample a row, read strictly; the format is stated in `docs/data.md`."""

from __future__ import annotations

import hashlib
import json
import stat
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from qwen_edit_zero.edit_data.manifests.names import NameRules, RowError
from qwen_edit_zero.edit_data.manifests.rows import Row, parse_row
from qwen_edit_zero.edit_data.manifests.samples import SKIP_HINT, OnError, Refusal, Sample, listed, refuse_or_raise
from qwen_edit_zero.edit_data.storage.local import LocalPlace
from qwen_edit_zero.edit_data.wording import nearest, shown, why_missing
from qwen_edit_zero.errors import DataError

__all__ = ["Manifest", "OnError", "Refusal", "Sample", "dataset_fingerprint", "read_manifest", "refuse_or_raise"]

MAX_ROW_BYTES = 1 << 20


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
    root = path.parent
    place = LocalPlace(root)
    samples: list[Sample] = []
    refused: list[Refusal] = []
    line_of: dict[str, int] = {}
    for line, raw in _lines(path):
        row: Row | None = None
        try:
            row = parse_row(raw, NameRules(), max_references=max_references)
            for name in (*row.sources, row.target):
                _check_there(root, name)
            sample_id = row.id or _content_id(row)
            if sample_id in line_of:
                raise RowError(_duplicate(row, sample_id, line_of[sample_id]))
        except RowError as error:
            refused.append(Refusal(line, row.id if row else None, str(error)))
            continue
        line_of[sample_id] = line
        samples.append(
            Sample(sample_id, place, row.sources, row.instruction, row.target, row.category, row.weight, line)
        )
    if refused and on_error == "stop":
        raise DataError(f"manifest {shown(path)}: {listed(refused)}\n{SKIP_HINT}")
    if not samples:
        what = f"no row can be used: {listed(refused)}" if refused else "it holds no sample: every line is blank"
        raise DataError(f"manifest {shown(path)}: {what}")
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


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Number and bytes of each line that is not blank, a byte order mark and line ends taken off."""
    try:
        with path.open("rb") as file:
            number = 0
            while raw := file.readline(MAX_ROW_BYTES + 1):
                number += 1
                if number == 1:
                    _check_beginning(path, raw)
                    raw = raw.removeprefix(b"\xef\xbb\xbf")
                if len(raw) > MAX_ROW_BYTES:
                    raise DataError(
                        f"manifest {shown(path)}, line {number}: over {MAX_ROW_BYTES:,} bytes; one sample a line"
                    )
                if raw.strip():
                    yield number, raw.rstrip(b"\r\n")
    except FileNotFoundError:
        raise DataError(f"manifest {shown(path)}: there is no such file{_similar(path)}") from None
    except OSError as error:
        raise DataError(f"manifest {shown(path)}: it cannot be read ({error.strerror or error})") from error
    if number == 0:
        raise DataError(f"manifest {shown(path)}: the file is empty; it needs one JSON object a line")


def _check_beginning(path: Path, raw: bytes) -> None:
    """Files of another kind than JSONL are refused as a whole, with what they seem to be."""
    if raw[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in raw[:4]:
        raise DataError(f"manifest {shown(path)}: it is not UTF-8 (it looks like UTF-16); save it as UTF-8")
    text = raw.removeprefix(b"\xef\xbb\xbf").strip()
    if text in (b"{", b"[") or (text.startswith(b"[") and text.endswith((b",", b"]")) and b"{" in text):
        kind = "a JSON array" if text.startswith(b"[") else "an object spread over many lines"
        one_line = "jq -c '.[]'" if text.startswith(b"[") else "jq -c ."
        raise DataError(
            f"manifest {shown(path)}: it is {kind}; JSONL has one object a line, whole. "
            f"Convert it with `{one_line} FILE > NEW.jsonl`"
        )


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


def _content_id(row: Row) -> str:
    """Id of a row without one: from its content, so that moving or adding rows changes no other sample's noise."""
    content = json.dumps([row.sources, row.instruction, row.target]).encode()
    return "row-" + hashlib.blake2b(content, digest_size=8).hexdigest()


def _duplicate(row: Row, sample_id: str, first: int) -> str:
    if row.id:
        return f"its id {shown(sample_id)} is that of line {first} too; ids must be unique"
    return f"it has the pictures and the instruction of line {first}; delete one of them, or give both an id"


def _similar(path: Path) -> str:
    try:
        near = nearest(path.name, (entry.name for entry in path.parent.iterdir()))
    except OSError:
        return f", nor its folder {shown(path.parent)}"
    return f"; the nearest name there is {shown(near)}" if near else ""
