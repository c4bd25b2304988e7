"""The lines of a text file, in blocks; what is certainly no manifest is refused by its first bytes."""

from __future__ import annotations

from collections.abc import Iterator

from qwen_edit_zero.edit_data.manifests.formats.base import Folder, Reader, name_of, read_block
from qwen_edit_zero.edit_data.manifests.names import RowError
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError

MAX_ROW_BYTES = 1 << 20
BOM = b"\xef\xbb\xbf"
_BLOCK = 1 << 21


def lines_of(
    folder: Folder, name: str, reader: Reader, *, start: int = 0, end: int | None = None
) -> Iterator[tuple[int, bytes | RowError]]:
    """Number and bytes of each line that is not blank, line ends and a byte order mark taken off.

    Counts `reader.lines` and `reader.done` on. A line over 1 MiB is a RowError.

    Args:
        start: byte where a line begins; numbers count from there.
        end: byte where another begins, at which to stop; None: the end of the file.
    """
    number, left = 0, (end if end is not None else 1 << 62) - start
    tail, is_too_long = b"", False
    with folder.open(name) as file:
        file.seek(start)
        is_first = start == 0
        while left > 0 and (block := read_block(file, folder, name, min(_BLOCK, left))):
            left -= len(block)
            if is_first:
                is_first = False
                block = block.removeprefix(BOM)
            lines = (tail + block).split(b"\n")
            tail = lines.pop()
            for raw in lines:
                number += 1
                reader.lines = number
                if is_too_long or len(raw) > MAX_ROW_BYTES:
                    is_too_long = False
                    yield number, _too_long()
                    continue
                raw = raw.rstrip(b"\r")
                if raw and not raw.isspace():
                    yield number, raw
            if len(tail) > MAX_ROW_BYTES:
                tail, is_too_long = b"", True
            reader.done += len(block)
    if tail or is_too_long:
        number += 1
        reader.lines = number
        if is_too_long or len(tail) > MAX_ROW_BYTES:
            yield number, _too_long()
        elif not tail.isspace():
            yield number, tail.rstrip(b"\r")


def head_of(folder: Folder, name: str, size: int = 1 << 16) -> bytes:
    """The first bytes of a text file, without a byte order mark. Raises DataError for one that is empty or UTF-16."""
    with folder.open(name) as file:
        head = read_block(file, folder, name, size)
    if not head:
        raise DataError(f"manifest {shown(name_of(folder, name))}: the file is empty; it needs one JSON object a line")
    if head[:2] in (b"\xff\xfe", b"\xfe\xff") or b"\0" in head[:4]:
        raise DataError(
            f"manifest {shown(name_of(folder, name))}: it is not UTF-8 (it looks like UTF-16); save it as UTF-8"
        )
    return head.removeprefix(BOM)


def _too_long() -> RowError:
    return RowError(f"it has over {MAX_ROW_BYTES:,} bytes; one sample a line")
