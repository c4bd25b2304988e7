"""Pictures that lie in cells of Parquet files."""

from __future__ import annotations

import bisect
import io
import itertools
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, BinaryIO

from qwen_edit_zero.edit_data.storage.files import RangedFile, Stamp, check_limit, recent_stamp, refusal
from qwen_edit_zero.edit_data.wording import nearest, shown
from qwen_edit_zero.errors import QwenEditError

_HELD_BYTES = 512 << 20  # of row groups; the last one read is always held
_HELD_TABLES = 32
_MOST_GROUP_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class ParquetCell:
    """A picture in a Parquet file: `ROW/COLUMN`, rows from 0, or `ROW/COLUMN/NUMBER` of a column of lists.

    The cell holds the file's bytes, or a struct with them under `bytes`, as Hugging Face writes. A row group is read
    as a whole and held for its other rows; see `PictureFile`.
    """

    archive: RangedFile
    cell: str

    @property
    def name(self) -> str:
        """See `PictureFile`."""
        return f"{self.archive.name}//{self.cell}"

    @property
    def location(self) -> str:
        """See `PictureFile`."""
        return f"{self.archive.location}//{self.cell}"

    def read(self, limit: int) -> bytes:
        """See `PictureFile`."""
        row, column = self._parted()
        content = _tables.cell(self.archive, recent_stamp(self.archive), row, column, self.name)
        check_limit(self.name, len(content), limit)
        return content

    def open(self) -> BinaryIO:
        """See `PictureFile`."""
        return io.BytesIO(self.read(_MOST_GROUP_BYTES))

    def stamp(self) -> Stamp:
        """The archive's stamp and the place in it; the size is the archive's, since nothing is read."""
        self._parted()
        archive = recent_stamp(self.archive)
        return Stamp(archive.size, f"{archive.version}-{self.cell}", archive.changed_ns)

    def _parted(self) -> tuple[int, str]:
        row, _, column = self.cell.partition("/")
        if not (row.isascii() and row.isdigit() and column):
            raise refusal(self.name, "a cell of a Parquet file is named FILE.parquet//ROW/COLUMN, with rows from 0")
        return int(row), column


class _Table:
    """An open Parquet file. Its stream is used by one thread at a time."""

    def __init__(self, archive: RangedFile) -> None:
        pyarrow = _pyarrow()
        try:
            self.file = pyarrow.parquet.ParquetFile(archive.open())
        except (pyarrow.ArrowException, OSError) as error:
            raise refusal(
                archive.name, f"it is no Parquet file that can be read ({_line(error)})", "archive"
            ) from error
        metadata = self.file.metadata
        groups = (metadata.row_group(i).num_rows for i in range(metadata.num_row_groups))
        self.starts = list(itertools.accumulate(groups, initial=0))
        self.lock = threading.Lock()

    def group(self, number: int, leaf: str, name: str) -> Any:
        """One column of a row group. Raises DataError."""
        metadata = self.file.metadata.row_group(number)
        for i in range(metadata.num_columns):
            column = metadata.column(i)
            if column.path_in_schema == leaf and column.total_uncompressed_size > _MOST_GROUP_BYTES:
                raise refusal(
                    name,
                    f"its row group has {column.total_uncompressed_size:,} bytes of {leaf}, and must be read whole; "
                    "write the file with row groups of about 100 rows",
                )
        pyarrow = _pyarrow()
        try:
            return self.file.read_row_group(number, columns=[leaf]).column(0).combine_chunks()
        except (pyarrow.ArrowException, OSError) as error:
            raise refusal(name, f"it cannot be read ({_line(error)})") from error


class _Tables:
    """Open files and row groups of this process, the last used ones, for all its threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[str, Stamp], _Table] = OrderedDict()
        self._groups: OrderedDict[tuple[str, Stamp, int, str], Any] = OrderedDict()
        self._bytes = 0

    def cell(self, archive: RangedFile, stamp: Stamp, row: int, column: str, name: str) -> bytes:
        """The bytes in a cell. Raises DataError."""
        table = self._table(archive, stamp)
        if row >= table.starts[-1]:
            raise refusal(name, f"the file has {table.starts[-1]:,} rows, numbered from 0")
        group = bisect.bisect_right(table.starts, row) - 1
        column, number = _column(table, column, name)
        values = self._group((archive.location, stamp, group, column), table, group, column, name)
        value = values[row - table.starts[group]].as_py()
        if isinstance(value, list):
            if number is None or number >= len(value):
                raise refusal(name, f"the cell is a list of {len(value)}; name one of them: ROW/COLUMN/NUMBER, from 0")
            value = value[number]
        if isinstance(value, dict):
            value = value.get("bytes")
        if not isinstance(value, bytes):
            raise refusal(name, "the cell holds no bytes of a picture" if value is None else "the cell is no picture")
        return value

    def _table(self, archive: RangedFile, stamp: Stamp) -> _Table:
        key = (archive.location, stamp)
        with self._lock:
            if key in self._open:
                self._open.move_to_end(key)
                return self._open[key]
        table = _Table(archive)
        with self._lock:
            table = self._open.setdefault(key, table)
            while len(self._open) > _HELD_TABLES:
                self._open.popitem(last=False)
        return table

    def _group(self, key: tuple[str, Stamp, int, str], table: _Table, group: int, column: str, name: str) -> Any:
        found = self._held(key)
        if found is not None:
            return found
        with table.lock:  # threads that want the same group wait for the first of them
            found = self._held(key)
            if found is None:
                found = table.group(group, _leaf(table, column), name)
                self._hold(key, found)
        return found

    def _held(self, key: tuple[str, Stamp, int, str]) -> Any:
        with self._lock:
            found = self._groups.get(key)
            if found is not None:
                self._groups.move_to_end(key)
            return found

    def _hold(self, key: tuple[str, Stamp, int, str], values: Any) -> None:
        with self._lock:
            self._groups[key] = values
            self._bytes += values.nbytes
            while self._bytes > _HELD_BYTES and len(self._groups) > 1:
                _, dropped = self._groups.popitem(last=False)
                self._bytes -= dropped.nbytes


_tables = _Tables()


def _after_fork() -> None:
    global _tables
    _tables = _Tables()  # open files share their positions with the parent


os.register_at_fork(after_in_child=_after_fork)


def _column(table: _Table, column: str, name: str) -> tuple[str, int | None]:
    """The column, and the number in a list behind its name. Raises DataError if there is no such column."""
    names = table.file.schema_arrow.names
    if column in names:
        return column, None
    head, _, number = column.rpartition("/")
    if head in names and number.isascii() and number.isdigit():
        return head, int(number)
    near = nearest(column, names)
    hint = f"; the nearest is {shown(near)}" if near else f"; it has {', '.join(map(shown, names[:10]))}"
    raise refusal(name, f"the file has no column {shown(column)}{hint}")


def _leaf(table: _Table, column: str) -> str:
    """The part of a column that is read: its bytes, without the rest of a struct."""
    kind = table.file.schema_arrow.field(column).type
    pyarrow = _pyarrow()
    return f"{column}.bytes" if pyarrow.types.is_struct(kind) and kind.get_field_index("bytes") >= 0 else column


def _pyarrow() -> Any:
    import pyarrow
    import pyarrow.parquet

    return pyarrow


def _line(error: BaseException) -> str:
    at: BaseException | None = error
    while at is not None:
        if isinstance(at, QwenEditError):
            raise at
        at = at.__cause__ or at.__context__
    return " ".join(str(error).split())
