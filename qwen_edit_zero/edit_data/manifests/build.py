"""Making the index of a manifest: by this process, or for a large JSON Lines file by several, each a range of bytes."""

from __future__ import annotations

import errno
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from qwen_edit_zero.edit_data.manifests.formats.base import Content, LocalFolder, Progress, Reader
from qwen_edit_zero.edit_data.manifests.formats.jsonl import OwnLines
from qwen_edit_zero.edit_data.manifests.index import HEADER, Header, assemble
from qwen_edit_zero.edit_data.manifests.index_part import PartWriter
from qwen_edit_zero.edit_data.manifests.names import NameRules, RowError
from qwen_edit_zero.edit_data.manifests.rows import Row, check_row, parse_row
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError, StorageError

_UNFINISHED = "unfinished"
_ABANDONED_SECONDS = 24 * 3600
_FORGOTTEN_SECONDS = 30 * 24 * 3600
_WORTH_A_WORKER = 64 << 20  # bytes; below, starting a process takes longer than it saves
_MOST_WORKERS = 16


def write_part(
    reader: Reader,
    folder: Path,
    rules: NameRules,
    *,
    location: str,
    max_references: int,
    on_progress: Progress | None = None,
) -> None:
    """Read all rows and write them to a part of an index. Raises DataError for a mistake of the whole manifest."""
    writer = PartWriter(folder, location=location)
    for number, content in _read(reader, location):
        row: Row | None = None
        try:
            if isinstance(content, bytes):
                row = parse_row(content, rules, max_references=max_references)
            elif isinstance(content, RowError):
                raise content
            else:
                row = check_row(content, rules, max_references=max_references, called=reader.called)
        except RowError as error:
            writer.refuse(number, None, str(error))
        else:
            writer.add(number, row)
        if on_progress and not number & 0x3FFF:
            on_progress(reader.done, reader.total)
    writer.close(lines=reader.lines, notes=reader.notes, places=reader.places)


def _read(reader: Reader, location: str) -> Iterator[tuple[int, Content]]:
    """The records, with what the operating system refuses told of the manifest, not of the index."""
    try:
        yield from reader.records()
    except OSError as error:
        raise DataError(f"manifest {shown(location)}: it cannot be read ({error.strerror or error})") from error


def build_index(
    reader: Reader,
    index_folder: Path,
    key: str,
    rules: NameRules,
    *,
    location: str,
    max_references: int,
    on_progress: Progress = lambda done, total: None,
    file: Path | None = None,
    workers: int | None = None,
) -> Path:
    """Make `index_folder/key` and return it; if another process was faster, theirs is taken.

    Args:
        file: the file, where `reader` is `OwnLines` of a local one: it may then be read by several processes.
        workers: how many; None: by its size and the processors.

    Raises:
        DataError: a mistake of the whole manifest.
        StorageError: the folder cannot be written.
    """
    final = index_folder / key
    work = index_folder / _UNFINISHED / f"{key}-{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    try:
        _sweep(index_folder / _UNFINISHED)
        work.mkdir(parents=True)
        try:
            ranges = line_ranges(file, workers) if file is not None and isinstance(reader, OwnLines) else []
            if len(ranges) > 1 and file is not None:
                parts = _by_workers(file, ranges, work, rules, max_references, on_progress)
            else:
                parts = [work / "part-000"]
                write_part(
                    reader,
                    parts[0],
                    rules,
                    location=location,
                    max_references=max_references,
                    on_progress=on_progress,
                )
            made = work / "index"
            made.mkdir()
            assemble(parts, made, Header(location, reader.title, reader.unit, notes=reader.given_notes))
            try:
                os.rename(made, final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not (final / HEADER).is_file():
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise StorageError(
            f"index of the manifest: {shown(index_folder)} cannot be written ({error.strerror or error}); make room "
            "or choose another folder (data.cache_dir)"
        ) from error
    return final


def line_ranges(file: Path, workers: int | None) -> list[tuple[int, int]]:
    """Cut a file into ranges of whole lines, of about the same size; one range if that is fast enough."""
    size = file.stat().st_size
    if workers is None:
        workers = min(len(os.sched_getaffinity(0)) - 1, size // _WORTH_A_WORKER, _MOST_WORKERS)
    if workers < 2:
        return [(0, size)]
    cuts = [0]
    with file.open("rb") as lines:
        for i in range(1, workers):
            lines.seek(size * i // workers)
            while (block := lines.read(1 << 16)) and b"\n" not in block:
                pass
            if not block:
                break
            cut = lines.tell() - len(block) + block.index(b"\n") + 1
            if cuts[-1] < cut < size:
                cuts.append(cut)
    return list(zip(cuts, [*cuts[1:], size], strict=True))


def _by_workers(
    file: Path,
    ranges: list[tuple[int, int]],
    work: Path,
    rules: NameRules,
    max_references: int,
    on_progress: Progress,
) -> list[Path]:
    """Have a new process (`worker.py`) write each part; new ones, because this one may have threads and a GPU."""
    parts = [work / f"part-{i:03d}" for i in range(len(ranges))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    children = []
    for part, (start, end) in zip(parts, ranges, strict=True):
        task = {
            "file": os.path.abspath(file), "start": start, "end": end, "part": os.path.abspath(part),
            "root": rules.root, "outside": rules.outside, "max_references": max_references,
        }  # fmt: skip
        with _said(part).open("wb") as said:  # a pipe that nobody empties would hold it up
            children.append(
                subprocess.Popen(
                    [sys.executable, "-m", "qwen_edit_zero.edit_data.manifests.worker", json.dumps(task)],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=said, env=environment,
                )
            )  # fmt: skip
    total = ranges[-1][1]
    try:
        while None in (ended := [child.poll() for child in children]) and not any(ended):
            time.sleep(0.1)
            on_progress(sum(_size(part / "progress") for part in parts), total)
        for part, child in zip(parts, children, strict=True):
            error = _said(part).read_text("utf-8", "replace").strip()
            if child.returncode == 2:
                raise DataError(error)
            if child.returncode:
                raise StorageError(f"index of the manifest: a process that read a part of it died: {error[-500:]}")
    finally:
        for child in children:
            if child.poll() is None:
                child.kill()
            child.wait()
    return parts


def _said(part: Path) -> Path:
    """What the process that writes a part says on its error stream."""
    return part.with_suffix(".said")


def _size(path: Path) -> int:
    try:
        return int(path.read_text() or 0)
    except (OSError, ValueError):
        return 0


def forget_indexes(index_folder: Path, location: str) -> None:
    """Remove indexes of earlier contents of a manifest that no run has opened for a month."""
    for header in index_folder.glob(f"*/{HEADER}"):
        with suppress(OSError, ValueError):
            is_old = time.time() - header.stat().st_mtime > _FORGOTTEN_SECONDS
            if is_old and json.loads(header.read_text(encoding="utf-8")).get("location") == location:
                shutil.rmtree(header.parent, ignore_errors=True)


def _sweep(folder: Path) -> None:
    """Remove what processes that died more than a day ago left."""
    with suppress(OSError):
        for path in folder.iterdir():
            if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(path, ignore_errors=True)


def local_file(folder: object, name: str) -> Path | None:
    """The path of a file of a local folder; None of another."""
    return Path(folder.location) / name if isinstance(folder, LocalFolder) else None
