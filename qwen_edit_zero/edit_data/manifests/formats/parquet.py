"""Parquet files, such as the Hugging Face Hub makes: pictures embedded as {bytes, path} or binary, or named by text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from qwen_edit_zero.edit_data.manifests.formats.base import Content, Folder, Progress, Reader, name_of, stamps_key
from qwen_edit_zero.edit_data.manifests.formats.columns import ColumnMap, Columns, find_map, unused_note
from qwen_edit_zero.edit_data.manifests.names import RowError
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError, QwenEditError

_BATCH = 1 << 13

T = TypeVar("T")


class ParquetTables(Reader):
    """Rows of one or more Parquet files of one layout, counted through.

    An embedded picture gets the name `FILE//ROW/COLUMN` (rows from 0; `/NUMBER` behind it in a list), which `storage`
    reads; the files stay as they are. Only columns of text and numbers are read here, and of pictures whether there
    is one.
    """

    unit = "row"
    uses_columns = True

    def __init__(self, folder: Folder, names: Sequence[str], told: Columns | None, title: str = "Parquet") -> None:
        super().__init__()
        self.title = title
        self._folder, self._names = folder, list(names)
        with folder.open(self._names[0]) as file:
            schema = _opened(folder, self._names[0], file).schema_arrow
        self._columns = find_map(schema.names, told=told, table=f"Parquet {self._names[0].rsplit('/', 1)[-1]}")
        self.called = self._columns.called
        self.total = sum(folder.size(name) for name in self._names)

    def content_key(self, on_progress: Progress) -> str:
        return stamps_key(self._folder, self._names)

    def records(self) -> Iterator[tuple[int, Content]]:
        unused: set[str] = set()
        for name in self._names:
            if len(self._names) > 1:
                self.places.append((name, self.lines + 1))
            size = self._folder.size(name)
            with self._folder.open(name) as file:
                table = _opened(self._folder, name, file)
                missing = self._columns.used() - set(table.schema_arrow.names)
                if missing:
                    raise DataError(
                        f"manifest {shown(name_of(self._folder, name))}: it has no column {shown(min(missing))}, and "
                        f"{shown(self._names[0])} has; all files of a set must have the same columns"
                    )
                unused |= set(table.schema_arrow.names) - self._columns.used()
                rows = max(1, table.metadata.num_rows)
                before = self.done
                for number, content in _readable(self._rows(table, name), self._folder, name):
                    self.lines += 1
                    self.done = before + size * (number + 1) // rows
                    yield self.lines, content
        self.notes = unused_note(unused)

    def _rows(self, table: Any, name: str) -> Iterator[tuple[int, Content]]:
        embedded, lists, light = _layout(table, self._columns, self._folder, name)
        number = 0
        for group in range(table.num_row_groups):
            held = {column: _is_held(table, group, leaf) for column, leaf in embedded.items()}
            before = 0
            for batch in table.iter_batches(batch_size=_BATCH, row_groups=[group], columns=light or None):
                cells = {column: batch.column(column).to_pylist() for column in batch.schema.names}
                for i in range(batch.num_rows):
                    row = {column: values[i] for column, values in cells.items()}
                    for column, there in held.items():
                        if there[before + i] if isinstance(there, list) else there:
                            row[column] = f"{name}//{number}/{column}"
                        else:  # perhaps its path is that of a file
                            row[column] = row[column].get("path") if isinstance(row.get(column), dict) else None
                    for column in lists:
                        row[column] = [f"{name}//{number}/{column}/{at}" for at in range(len(row[column] or ()))]
                    yield number, self._content(row)
                    number += 1
                before += batch.num_rows

    def _content(self, row: dict[str, Any]) -> Content:
        try:
            return self._columns.values(row)
        except RowError as error:
            return error


def _opened(folder: Folder, name: str, file: Any) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(file, page_checksum_verification=True)
    except (pyarrow.ArrowException, OSError) as error:
        raise _unreadable(error, folder, name) from error


def _readable(rows: Iterator[T], folder: Folder, name: str) -> Iterator[T]:
    import pyarrow

    try:
        yield from rows
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise _unreadable(error, folder, name) from error


def _unreadable(error: BaseException, folder: Folder, name: str) -> QwenEditError:
    at: BaseException | None = error
    while at is not None:  # what a store answered comes wrapped
        if isinstance(at, QwenEditError):
            return at
        at = at.__cause__ or at.__context__
    reason = " ".join(str(error).split())
    return DataError(
        f"manifest {shown(name_of(folder, name))}: it is no Parquet file that can be read ({reason[:200]}); "
        "was it cut short or damaged?"
    )


def _layout(table: Any, columns: ColumnMap, folder: Folder, name: str) -> tuple[dict[str, str], set[str], list[str]]:
    """The leaf of the bytes of each column with embedded pictures, the columns with lists of them, and the small
    leaves, which alone are read."""
    import pyarrow

    types, schema = pyarrow.types, table.schema_arrow
    leaves = [table.schema.column(i).path for i in range(len(table.schema))]
    pictures = {*columns.sources, *(columns.of[key] for key in ("target", "mask") if key in columns.of)}
    embedded: dict[str, str] = {}
    lists: set[str] = set()
    light = []
    for column in sorted(columns.used()):
        kind = schema.field(column).type
        is_list = types.is_list(kind) or types.is_large_list(kind)
        inner = kind.value_type if is_list else kind
        is_struct, is_binary = types.is_struct(inner), types.is_binary(inner) or types.is_large_binary(inner)
        if column not in pictures or not (is_struct or is_binary):
            light.append(column)
        elif is_struct and inner.get_field_index("bytes") < 0:
            raise DataError(
                f"manifest {shown(name_of(folder, name))}: column {shown(column)} is {kind}, not a picture "
                "({bytes, path}, binary, or a file name)"
            )
        elif is_list:
            lists.add(column)
            small = [leaf for leaf in leaves if leaf.startswith(f"{column}.") and leaf.endswith(".path")]
            light += small or [column]  # without paths, only the pictures say how many there are
        else:
            embedded[column] = f"{column}.bytes" if is_struct else column
            if is_struct and inner.get_field_index("path") >= 0:
                light.append(f"{column}.path")
    return embedded, lists, light


def _is_held(table: Any, group: int, leaf: str) -> bool | list[bool]:
    """Whether all pictures of a row group are there, by its statistics; a list where some are, which must be read."""
    metadata = table.metadata.row_group(group)
    for i in range(metadata.num_columns):
        column = metadata.column(i)
        if column.path_in_schema == leaf:
            statistics = column.statistics
            if statistics is not None and statistics.has_null_count and statistics.null_count in (0, metadata.num_rows):
                return bool(statistics.null_count == 0)
    held: list[bool] = []
    for batch in table.iter_batches(batch_size=64, row_groups=[group], columns=[leaf]):
        column = batch.column(0)
        held.extend((column.field("bytes") if leaf.endswith(".bytes") else column).is_valid().to_pylist())
    return held
