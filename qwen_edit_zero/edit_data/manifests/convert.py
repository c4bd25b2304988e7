"""Writing a manifest of any known format as our JSON Lines; pictures in archives become files beside it."""

from __future__ import annotations

import contextlib
import os
import posixpath
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import orjson

from qwen_edit_zero.edit_data.manifests.absent import AbsentPictures
from qwen_edit_zero.edit_data.manifests.formats.columns import Columns
from qwen_edit_zero.edit_data.manifests.opening import open_manifest
from qwen_edit_zero.edit_data.manifests.samples import OnError, Refusal, Sample
from qwen_edit_zero.edit_data.storage.names import split_member
from qwen_edit_zero.edit_data.storage.options import DEFAULTS, StorageOptions
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError, StorageError

_MAX_PICTURE_BYTES = 256 << 20
_MOST_TOLD = 100
_ENDINGS = (  # by first bytes; what a picture really is, whatever it was called
    (b"\xff\xd8\xff", ".jpg"), (b"\x89PNG", ".png"), (b"GIF8", ".gif"), (b"BM", ".bmp"), (b"II*\0", ".tif"),
    (b"MM\0*", ".tif"), (b"\0\0\0\x0cjP", ".jp2"),
)  # fmt: skip


@dataclass
class Converted:
    """What a conversion did.

    Attributes:
        description: the source and what is in it, in one line.
        rows: written.
        refused: the first rows that were left out, and how many there are; all are in `refused_file`, if any.
        pictures: taken out of archives, into `pictures_folder`.
        outside: folders outside the new manifest's that pictures lie in; `data.outside` must allow them.
        absent_rows: of `rows`, those that name a picture which is not there; `absent` tells the first.
        unasked_rows: of `rows`, those with pictures on an object store, which is not asked.
        reasons: how many rows were left out for what, most first; without names and numbers.
    """

    description: str
    rows: int
    refused: list[Refusal]
    refused_count: int
    refused_file: Path
    pictures: int
    pictures_folder: Path
    outside: list[str]
    absent_rows: int = 0
    absent: list[str] = field(default_factory=list)
    unasked_rows: int = 0
    reasons: dict[str, int] = field(default_factory=dict)


def convert_manifest(
    source: str,
    out: Path,
    *,
    form: str = "auto",
    columns: Columns | None = None,
    outside: Sequence[str] = (),
    split: str | None = None,
    on_error: OnError = "stop",
    max_references: int = 3,
    storage: StorageOptions = DEFAULTS,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
) -> Converted:
    """Write `out` from the manifest `source`; it appears whole or not at all.

    Ids are written for all rows, so that each keeps its noise. Names become relative to the folder of `out`. Pictures
    in Parquet files and tar shards are written into a folder `NAME_pictures` beside `out`, byte for byte.

    Raises:
        DataError: `out` or that folder exists, or the source is wrong (see `open_manifest`).
        StorageError: `out` cannot be written.
    """
    pictures, left_out = out.with_name(f"{out.stem}_pictures"), out.with_name(f"{out.stem}_left_out.jsonl")
    for path in (out, pictures, left_out):
        if os.path.lexists(path):
            raise DataError(f"{shown(path)} is there already and is not overwritten; give another name or delete it")
    if not out.parent.is_dir():
        raise DataError(f"{shown(out)}: there is no folder {shown(out.parent)}")
    try:
        with _working_folder(out) as work:
            table = open_manifest(
                source, max_references=max_references, on_error=on_error, split=split, index_folder=work / "index",
                form=form, outside=outside, columns=columns, storage=storage,
            )  # fmt: skip
            writer = _Writer(out, work / "pictures", pictures.name)
            with (work / "rows").open("w", encoding="utf-8") as file, AbsentPictures() as absent:
                for number, sample in enumerate(table):
                    writer.write(sample, number, file)
                    absent.look(table.where(sample.line), sample, writer.files)
                    on_progress(number + 1, len(table))
            refused = table.refused
            if refused:
                with (work / "left_out").open("wb") as lines:
                    lines.writelines(
                        orjson.dumps({"line": r.line, "id": r.id, "reason": str(r)}) + b"\n" for r in refused
                    )
                os.rename(work / "left_out", left_out)
            if writer.pictures:
                os.rename(work / "pictures", pictures)
            os.rename(work / "rows", out)
            return Converted(
                table.describe(), len(table), refused[:_MOST_TOLD], len(refused), left_out, writer.pictures, pictures,
                sorted(writer.outside), absent.rows, absent.first, writer.remote_rows, table.refused_reasons,
            )  # fmt: skip
    except OSError as error:
        raise StorageError(f"{shown(out)} cannot be written ({error.strerror or error})") from error


def values_of(sample: Sample, name: Callable[[str, str], str]) -> dict[str, Any]:
    """The JSON object of a sample in our manifests.

    Args:
        name: what is written for a name and the role of its picture: source0, source1, ..., target or mask.
    """
    row: dict[str, Any] = {"id": sample.id}
    row["source"] = [name(source, f"source{i}") for i, source in enumerate(sample.source_names)]
    row["instruction"] = sample.instruction
    row["target"] = name(sample.target_name, "target")
    if sample.category is not None:
        row["category"] = sample.category
    if sample.weight != 1.0:
        row["weight"] = sample.weight
    if sample.split is not None:
        row["split"] = sample.split
    if sample.mask_name is not None:
        row["mask"] = name(sample.mask_name, "mask")
    if sample.paraphrases:
        row["paraphrases"] = sample.paraphrases
    return row


class _Writer:
    def __init__(self, out: Path, folder: Path, folder_name: str) -> None:
        self._base, self._folder, self._folder_name = os.path.abspath(out.parent), folder, folder_name
        self._last: dict[str, str] = {}  # pictures of the sample being written
        self.pictures = 0
        self.outside: set[str] = set()
        self.files: list[tuple[str, str]] = []  # (name, path) of the sample's pictures that are files of their own
        self.remote_rows = 0
        self._is_remote = False

    def write(self, sample: Sample, number: int, file: TextIO) -> None:
        self._last.clear()
        self.files, self._is_remote = [], False
        row = values_of(sample, lambda name, role: self._name(sample, name, number, role))
        file.write(orjson.dumps(row).decode() + "\n")
        self.remote_rows += self._is_remote

    def _name(self, sample: Sample, name: str, number: int, role: str) -> str:
        if split_member(name):
            return self._extracted(sample, name, number, role)
        if "://" in name or "://" in sample.place.name:
            whole = name if "://" in name else f"{sample.place.name.rstrip('/')}/{name}"
            self.outside.add(posixpath.dirname(whole))
            self._is_remote = True
            return whole
        whole = os.path.normpath(os.path.join(sample.place.name, name))
        self.files.append((name, whole))
        relative = os.path.relpath(whole, self._base)
        if relative.startswith("../"):
            self.outside.add(os.path.dirname(whole))
        return relative

    def _extracted(self, sample: Sample, name: str, number: int, role: str) -> str:
        if name in self._last:  # one picture twice in a row
            return self._last[name]
        content = sample.place.file(name).read(_MAX_PICTURE_BYTES)
        ending = next((end for begin, end in _ENDINGS if content.startswith(begin)), None)
        if ending is None:
            ending = ".webp" if content[8:12] == b"WEBP" else ".avif" if content[4:12] == b"ftypavif" else ".bin"
        # a folder a thousand samples: no file system likes millions of names in one
        relative = f"{number // 1000:05d}/{re.sub(r'[^A-Za-z0-9_-]', '_', sample.id)[:80]}-{number}.{role}{ending}"
        path = self._folder / relative
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self.pictures += 1
        self._last[name] = f"{self._folder_name}/{relative}"
        return self._last[name]


@contextlib.contextmanager
def _working_folder(out: Path) -> Iterator[Path]:
    """On the file system of `out`, so that what is made can be renamed."""
    folder = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
