"""JSON Lines: our own, and those of DiffSynth, musubi-tuner and imagefolder; also a JSON array of such objects."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from qwen_edit_zero.edit_data.manifests.formats.base import (
    Content,
    Folder,
    Progress,
    Reader,
    name_of,
    read_block,
)
from qwen_edit_zero.edit_data.manifests.formats.columns import unused_note
from qwen_edit_zero.edit_data.manifests.formats.lines import BOM, MAX_ROW_BYTES, lines_of
from qwen_edit_zero.edit_data.manifests.names import RowError
from qwen_edit_zero.edit_data.manifests.rows import parse_object
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError

Convert = Callable[[dict[str, Any]], tuple[Mapping[str, Any], set[str]]]


class OwnLines(Reader):
    """Our JSON Lines; `start` and `end` cut out a range of whole lines, numbered from its beginning."""

    title = "JSONL"

    def __init__(self, folder: Folder, name: str, *, start: int = 0, end: int | None = None) -> None:
        super().__init__()
        self._folder, self._name, self._start, self._end = folder, name, start, end
        self.total = (folder.size(name) if end is None else end) - start

    def records(self) -> Iterator[tuple[int, Content]]:
        yield from lines_of(self._folder, self._name, self, start=self._start, end=self._end)

    def content_key(self, on_progress: Progress) -> str:
        return self._folder.content_key(self._name, on_progress)


class MappedLines(Reader):
    """JSON Lines of another format.

    Args:
        convert: from an object to values under our keys and the keys that were used. Raises RowError.
        called: the user's name for each key of ours.
    """

    def __init__(self, folder: Folder, name: str, title: str, convert: Convert, called: Mapping[str, str]) -> None:
        super().__init__()
        self.title, self.called = title, called
        self._folder, self._name, self._convert = folder, name, convert
        self.total = folder.size(name)

    def records(self) -> Iterator[tuple[int, Content]]:
        unused: set[str] = set()
        for number, raw in self._objects():
            if isinstance(raw, RowError):
                yield number, raw
                continue
            try:
                cells = parse_object(raw)
                values, used = self._convert(cells)
            except RowError as error:
                yield number, error
                continue
            if len(unused) < 100:
                unused.update(key for key in cells if key not in used)
            yield number, values
        self.notes = unused_note(unused)

    def content_key(self, on_progress: Progress) -> str:
        return self._folder.content_key(self._name, on_progress)

    def _objects(self) -> Iterator[tuple[int, bytes | RowError]]:
        return lines_of(self._folder, self._name, self)


class MappedArray(MappedLines):
    """A JSON array of objects, cut into them without holding the file in memory."""

    def _objects(self) -> Iterator[tuple[int, bytes | RowError]]:
        for number, raw in _array_objects(self._folder, self._name, self):
            self.lines = number
            yield number, raw


_MARK = re.compile(rb'["\\{}\n]')


def _array_objects(folder: Folder, name: str, reader: Reader) -> Iterator[tuple[int, bytes]]:
    """Line and bytes of each object of an array. Raises DataError where the file is no such array."""
    line, depth, in_text, skip = 1, 0, False, False
    pending = bytearray()  # of the object that is open
    began = 0  # its line
    is_begun = False
    between = bytearray()
    with folder.open(name) as file:
        while block := read_block(file, folder, name, 1 << 20):
            at = 0
            if skip:  # the block before ended with a backslash
                skip = False
                if depth:
                    pending += block[:1]
                at = 1
            while match := _MARK.search(block, at):
                mark, here = match[0], match.start()
                into = pending if depth else between
                into += block[at:here]
                at = here + 1
                if mark == b"\n":
                    line += 1
                    into += mark
                elif in_text:
                    into += mark
                    if mark == b'"':
                        in_text = False
                    elif mark == b"\\":
                        into += block[at : at + 1]
                        skip = at >= len(block)
                        line += block[at : at + 1] == b"\n"
                        at += 1
                elif mark == b'"':
                    in_text = True
                    into += mark
                elif mark == b"{":
                    if depth == 0:
                        began = line
                        _check_between(folder, name, between, b"," if is_begun else b"[", line)
                        is_begun = True
                        between.clear()
                    depth += 1
                    pending += mark
                elif mark == b"}" and depth:
                    pending += mark
                    depth -= 1
                    if depth == 0:
                        yield began, bytes(pending)
                        pending.clear()
                else:
                    into += mark
                if len(pending) > MAX_ROW_BYTES or len(between) > MAX_ROW_BYTES:
                    raise DataError(
                        f"manifest {shown(name_of(folder, name))}, line {began or 1}: an object of over "
                        f"{MAX_ROW_BYTES:,} bytes; one sample an object"
                    )
            (pending if depth else between).extend(block[at:])
            reader.done += len(block)
    rest = b"".join(bytes(between).removeprefix(BOM).split())
    if depth or not rest.endswith(b"]"):
        raise DataError(
            f"manifest {shown(name_of(folder, name))}, line {began if depth else line}: the array does not end; was "
            "the file cut short?"
        )
    if rest != (b"]" if is_begun else b"[]"):
        raise DataError(f"manifest {shown(name_of(folder, name))}, line {line}: it is not an array of objects")


def _check_between(folder: Folder, name: str, between: bytearray, wanted: bytes, line: int) -> None:
    text = bytes(between).removeprefix(BOM).strip()
    if text != wanted:
        raise DataError(
            f"manifest {shown(name_of(folder, name))}, line {line}: {shown(text[:40].decode('utf-8', 'replace'))} "
            f"where {shown(wanted.decode())} should be; it is not an array of objects"
        )
