"""WebDataset shards: tar files whose members `KEY.EXTENSION` with one key, one after another, are a sample.

The extension is all behind the first dot of the file's name (the rule of webdataset's `base_plus_ext`). Its last part
tells the kind: `json` holds columns, `txt` is a text, a picture's ending a picture. What is before it names the column:
`0001.source.jpg` and `0001.jpg` are the columns `source` and `image`; `0001.txt` is the instruction.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from qwen_edit_zero.edit_data.manifests.formats.base import Content, Folder, Progress, Reader, name_of, stamps_key
from qwen_edit_zero.edit_data.manifests.formats.columns import ColumnMap, Columns, find_map, unused_note
from qwen_edit_zero.edit_data.manifests.formats.lines import MAX_ROW_BYTES
from qwen_edit_zero.edit_data.manifests.formats.pairs import PICTURES
from qwen_edit_zero.edit_data.manifests.names import RowError
from qwen_edit_zero.edit_data.manifests.rows import parse_object
from qwen_edit_zero.edit_data.storage.tar import TarEntry, tar_entries
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError

_MEMBER = re.compile(r"(?s)((?:.*/|)[^.]+)[.]([^/]*)")
_TEXTS = ("txt", "text", "caption")


class WebDatasetShards(Reader):
    """The samples of one or more shards, counted through; pictures get the name `SHARD.tar//MEMBER`."""

    title = "WebDataset"
    unit = "sample"
    uses_columns = True

    def __init__(self, folder: Folder, names: Sequence[str], told: Columns | None) -> None:
        super().__init__()
        self._folder, self._names = folder, list(names)
        self.total = sum(folder.size(name) for name in self._names)
        first = next(self._samples(self._names[0]), None)
        if first is None:
            raise DataError(
                f"manifest {shown(name_of(folder, self._names[0]))}: it holds no file such as 0001.jpg or 0001.json, "
                "so it is no WebDataset shard"
            )
        cells = first[1]
        if isinstance(cells, RowError):
            raise DataError(f"manifest {shown(name_of(folder, self._names[0]))}, {shown(first[0])}: {cells}")
        self._columns: ColumnMap = find_map(list(cells), told=told, table=f"WebDataset {_last(self._names[0])}")
        self.called = self._columns.called
        self.done = 0

    def content_key(self, on_progress: Progress) -> str:
        return stamps_key(self._folder, self._names)

    def records(self) -> Iterator[tuple[int, Content]]:
        unused: set[str] = set()
        for name in self._names:
            if len(self._names) > 1:
                self.places.append((name, self.lines + 1))
            for key, cells in self._samples(name):
                self.lines += 1
                yield self.lines, self._content(key, cells)
                if not isinstance(cells, RowError) and len(unused) < 100:
                    unused |= set(cells) - self._columns.for_row(cells).used()
        self.notes = unused_note(unused - {"__key__"})

    def _content(self, key: str, cells: dict[str, Any] | RowError) -> Content:
        try:
            if isinstance(cells, RowError):
                raise cells
            return self._columns.for_row(cells).values(cells)
        except RowError as error:
            return RowError(f"{shown(key)}: {error}")

    def _samples(self, name: str) -> Iterator[tuple[str, dict[str, Any] | RowError]]:
        """Key and columns of each sample of a shard."""
        open_key: str | None = None
        cells: dict[str, Any] | RowError = {}
        seen: set[str] = set()
        before = self.done
        with self._folder.open(name) as file:
            for entry in tar_entries(file, name_of(self._folder, name)):
                self.done = before + entry.offset + entry.size
                match = _MEMBER.fullmatch(entry.name)
                if match is None or posixpath.basename(entry.name).startswith("."):
                    continue
                key, extension = match[1], match[2]
                if key != open_key:
                    if open_key is not None:
                        yield open_key, cells
                    open_key, cells = key, {}
                    if key in seen:
                        cells = RowError("its files do not stand one after another in the shard")
                    if len(seen) < 1_000_000:
                        seen.add(key)
                if isinstance(cells, dict):
                    try:
                        _add(cells, extension, name, file, entry)
                    except RowError as error:
                        cells = error
        if open_key is not None:
            yield open_key, cells


def _add(cells: dict[str, Any], extension: str, shard: str, file: BinaryIO, member: TarEntry) -> None:
    """Add what a member holds to the columns of its sample. Raises RowError."""
    column, _, ending = extension.rpartition(".")
    ending = ending.lower()
    if f".{ending}" in PICTURES:
        _set(cells, column or "image", f"{shard}//{member.name}")
    elif ending in ("json", "jsn"):
        values = parse_object(_content_of(file, member))
        for key, value in values.items():
            _set(cells, key, value)
    elif ending in _TEXTS:
        try:
            text = _content_of(file, member).decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            raise RowError(f"{shown(member.name)} is not UTF-8 (byte {error.start + 1})") from None
        _set(cells, column or ("caption" if ending == "caption" else "text"), text)
    else:
        cells.setdefault(extension, None)  # told as not used


def _content_of(file: BinaryIO, member: TarEntry) -> bytes:
    if member.size > MAX_ROW_BYTES:
        raise RowError(f"{shown(member.name)} has {member.size:,} bytes; at most {MAX_ROW_BYTES:,} are read")
    file.seek(member.offset)
    return file.read(member.size)


def _set(cells: dict[str, Any], column: str, value: Any) -> None:
    if column in cells:
        raise RowError(f"it has {shown(column)} twice")
    cells[column] = value


def _last(name: str) -> str:
    return name.rsplit("/", 1)[-1]
