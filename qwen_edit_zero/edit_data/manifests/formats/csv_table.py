"""Tables with commas (RFC 4180): a header, then a row a sample."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from typing import Any

from qwen_edit_zero.edit_data.manifests.formats.base import Content, Folder, Progress, Reader, name_of
from qwen_edit_zero.edit_data.manifests.formats.columns import ColumnMap, unused_note
from qwen_edit_zero.edit_data.manifests.formats.lines import BOM, MAX_ROW_BYTES
from qwen_edit_zero.edit_data.manifests.names import RowError
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError


class CsvTable(Reader):
    """A CSV file; its rows are numbered by the line they begin on."""

    def __init__(self, folder: Folder, name: str, title: str, columns: ColumnMap) -> None:
        super().__init__()
        self.title, self.called = title, columns.called
        self._folder, self._name, self._columns = folder, name, columns
        self.total = folder.size(name)

    def content_key(self, on_progress: Progress) -> str:
        return self._folder.content_key(self._name, on_progress)

    def records(self) -> Iterator[tuple[int, Content]]:
        lines = _decoded(self._folder, self._name, self)
        rows = csv.reader(lines, strict=True)
        header = _header(rows, self._folder, self._name)
        self.notes = unused_note(set(header) - self._columns.used())
        while True:
            number = rows.line_num + 1
            try:
                cells = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                self.lines = rows.line_num
                yield number, RowError(f"it is not CSV: {error}")
                continue
            self.lines = rows.line_num
            if cells:
                yield number, self._content(header, cells)

    def _content(self, header: list[str], cells: list[str]) -> Content:
        if len(cells) != len(header):
            many = "few" if len(cells) < len(header) else "many"
            return RowError(f"it has too {many} cells: {len(cells)}, and the header has {len(header)}")
        for name, cell in zip(header, cells, strict=True):
            if not cell.isascii():
                try:
                    cell.encode()
                except UnicodeEncodeError as error:
                    byte = ord(cell[error.start]) - 0xDC00
                    return RowError(f"{shown(name)} holds the byte 0x{byte:02X}, which is not UTF-8; save it as UTF-8")
        values: dict[str, Any]
        try:
            values = self._columns.values(dict(zip(header, cells, strict=True)))
        except RowError as error:
            return error
        try:
            for key in {"source", "paraphrases"} & values.keys():
                values[key] = _listed(self.called[key], values[key])
        except RowError as error:
            return error
        if "weight" in values:
            try:
                values["weight"] = float(values["weight"])
            except ValueError:
                return RowError(f"{shown(self.called['weight'])} is {shown(values['weight'])}, not a number")
        return values


def _listed(column: str, cell: Any) -> Any:
    """A cell that holds a JSON list of texts as that list; any other as it is.

    Raises RowError for a list as Python prints it, which would else be a strange name.
    """
    if not isinstance(cell, str) or not cell.startswith("[") or not cell.endswith("]"):
        return cell
    try:
        found = json.loads(cell)
    except ValueError:
        if cell[1:].lstrip().startswith("'"):
            raise RowError(
                f"{shown(column)} is {shown(cell)}, a list as Python prints it; write it as JSON, "
                'as in ["a.png", "b.png"]'
            ) from None
        return cell
    return found if isinstance(found, list) and found and all(isinstance(text, str) for text in found) else cell


def csv_header(folder: Folder, name: str) -> list[str]:
    """The names of the columns. Raises DataError if there are none or one stands twice."""
    return _header(csv.reader(_decoded(folder, name, None), strict=True), folder, name)


def _header(rows: Iterator[list[str]], folder: Folder, name: str) -> list[str]:
    where = f"manifest {shown(name_of(folder, name))}"
    try:
        cells = next(rows, [])
    except csv.Error as error:
        raise DataError(f"{where}: its first line is not CSV: {error}") from error
    if not any(cell.strip() for cell in cells):
        raise DataError(f"{where}: its first line is empty; a CSV begins with the names of its columns")
    twice = {cell for cell in cells if cells.count(cell) > 1}
    if twice:
        raise DataError(f"{where}: the column {shown(min(twice))} stands in its first line twice")
    if len(cells) == 1 and any(mark in cells[0] for mark in ";\t"):
        raise DataError(f"{where}: its columns are not separated by commas; save it as CSV with commas")
    return cells


def _decoded(folder: Folder, name: str, reader: Reader | None) -> Iterator[str]:
    """Lines with their ends; bytes that are not UTF-8 become lone surrogates, for the row to be refused by."""
    csv.field_size_limit(MAX_ROW_BYTES)
    with folder.open(name) as file:
        try:
            for number, raw in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 1), b"")):
                if len(raw) > MAX_ROW_BYTES:
                    raise DataError(
                        f"manifest {shown(name_of(folder, name))}, line {number + 1}: over {MAX_ROW_BYTES:,} bytes; "
                        "one sample a row"
                    )
                if reader:
                    reader.done += len(raw)
                yield (raw.removeprefix(BOM) if number == 0 else raw).decode("utf-8", "surrogateescape")
        except OSError as error:
            raise DataError(
                f"manifest {shown(name_of(folder, name))}: it cannot be read ({error.strerror or error})"
            ) from error
