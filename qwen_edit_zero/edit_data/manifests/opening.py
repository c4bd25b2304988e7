"""Opening a manifest of any known format as a table: rank 0 makes the index or finds it, all ranks map it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import xxhash
from tqdm import tqdm

from qwen_edit_zero import errors
from qwen_edit_zero.edit_data.manifests.build import build_index, forget_indexes, local_file
from qwen_edit_zero.edit_data.manifests.formats.base import Folder, LocalFolder, Reader
from qwen_edit_zero.edit_data.manifests.formats.columns import Columns
from qwen_edit_zero.edit_data.manifests.formats.recognise import open_reader
from qwen_edit_zero.edit_data.manifests.formats.store_folder import StoreFolder
from qwen_edit_zero.edit_data.manifests.index import HEADER, VERSION, Index
from qwen_edit_zero.edit_data.manifests.names import NameRules
from qwen_edit_zero.edit_data.manifests.samples import OnError, refuse_or_raise
from qwen_edit_zero.edit_data.manifests.table import SampleTable
from qwen_edit_zero.edit_data.storage.local import LocalPlace
from qwen_edit_zero.edit_data.storage.names import is_url
from qwen_edit_zero.edit_data.storage.options import DEFAULTS, StorageOptions
from qwen_edit_zero.edit_data.storage.place import open_place, place_of_url
from qwen_edit_zero.edit_data.wording import nearest, shown
from qwen_edit_zero.errors import DataError, QwenEditError

_VISIBLE_SECONDS = 60.0  # within which a shared file system shows what another node has written
_SILENT_SECONDS = 5.0  # after which a bar appears


def open_manifest(
    location: str | Path,
    *,
    max_references: int = 3,
    on_error: OnError = "stop",
    split: str | None = None,
    index_folder: Path | None = None,
    form: str = "auto",
    outside: Sequence[str] = (),
    columns: Columns | None = None,
    rank: int = 0,
    from_rank_0: Callable[[Any], Any] = lambda value: value,
    storage: StorageOptions = DEFAULTS,
    workers: int | None = None,
) -> SampleTable:
    """The samples of a manifest; collective if there are several ranks. No picture is looked for here.

    Its rows are read and checked once: the index in `index_folder` is keyed by the manifest's content (single files by
    their bytes; sets of archives and of picture folders by names, sizes and times) and by what decides how it is
    read, so that it is found again. Two processes may open one manifest at the same time.

    Args:
        location: a file, a folder or a pattern, local or the URL of a store; see `formats.recognise`.
        max_references: most reference pictures a sample may have.
        on_error: "stop" raises if any row is refused; "skip" leaves them out (`SampleTable.refused`).
        split: take only its rows; those without a split belong to "train". None: all.
        index_folder: on a file system that all ranks share; None: a temporary one, gone with the table.
        form: "auto" or one of `recognise.FORMATS`.
        outside: folders and URLs that names may lead to, besides the manifest's own folder.
        columns: see `columns.find_map`.
        from_rank_0: gives rank 0's small object to all ranks.
        storage: how stores are asked, for a manifest or pictures that lie on one.
        workers: processes that read a large JSON Lines file; None: by its size and the processors.

    Raises:
        DataError: it cannot be read or recognised, has refused rows (under "stop"), no usable row, or no such split.
        StorageError: the index cannot be written.
    """
    name = os.fspath(location)
    temporary = None
    if index_folder is None:
        temporary = from_rank_0(tempfile.mkdtemp(prefix="manifest-index-") if rank == 0 else None)
    told: tuple[str, str, str] | None = None
    if rank == 0:
        try:
            folder, inside = _parted(name, storage)
            rules = NameRules(folder.location, tuple(_absolute(root) for root in outside))
            reader = open_reader(folder, inside, form=form, told=columns)
            index = _make(
                reader,
                folder,
                inside,
                Path(temporary or index_folder or ""),
                rules,
                columns,
                max_references,
                name,
                workers,
            )
            told = ("", str(index), folder.location)
        except QwenEditError as error:
            told = (_kind(error), str(error), "")
    kind, text, root = from_rank_0(told)
    if kind:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
        raise getattr(errors, kind)(text)
    _wait_for(Path(text), rank)
    table = SampleTable(Index(Path(text)), open_place(root, storage), name=shown(name))
    if temporary is not None and rank == 0:
        weakref.finalize(table, shutil.rmtree, temporary, ignore_errors=True)
    return _checked(table, name, split, on_error)


def _make(
    reader: Reader,
    folder: Folder,
    inside: str,
    index_folder: Path,
    rules: NameRules,
    columns: Columns | None,
    max_references: int,
    location: str,
    workers: int | None,
) -> Path:
    """The folder of the index, which is made if it is not there or damaged."""
    stamp = folder.stamp(inside) if inside and folder.is_file(inside) else ""
    with _Bar(f"looking at {location}") as bar:
        content = reader.content_key(bar.show)
    # names are relative, so the root matters only where others may be reached from it
    asked = (VERSION, content, reader.title, max_references, rules.outside, rules.outside and rules.root, columns)
    key = xxhash.xxh3_128_hexdigest(repr(asked).encode("utf-8", "surrogateescape"))
    path = index_folder / key
    if path.exists():
        try:
            Index(path).check()
        except DataError:
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                os.utime(path / HEADER)  # for `forget_indexes`
            return path
    forget_indexes(index_folder, location)
    with _Bar(f"reading {location}") as bar:
        built = build_index(
            reader,
            index_folder,
            key,
            rules,
            location=location,
            max_references=max_references,
            on_progress=bar.show,
            file=local_file(folder, inside),
            workers=workers,
        )
    if stamp and folder.stamp(inside) != stamp:
        shutil.rmtree(built, ignore_errors=True)
        raise DataError(f"manifest {shown(location)}: it changed while it was read; start again when it is complete")
    return built


def _checked(table: SampleTable, name: str, split: str | None, on_error: OnError) -> SampleTable:
    refused = table.refused
    if not len(table) and not len(refused):
        raise DataError(f"manifest {shown(name)}: it holds no sample: every line is blank")
    refuse_or_raise(refused, left=len(table), path=name, on_error=on_error)
    if split is None:
        return table
    chosen = table.of_split(split)
    if not len(chosen):
        names = [found for found in table.splits if found]
        near = nearest(split, names)
        there = ", ".join(f"{found or 'none'} {count:,}" for found, count in table.splits.items())
        hint = f"; did you mean {shown(near)}?" if near else "."
        raise DataError(f"manifest {shown(name)}: no row is of split {shown(split)}{hint} Its rows by split: {there}")
    return chosen


def _parted(location: str, options: StorageOptions) -> tuple[Folder, str]:
    """The folder that names are relative to, and what is meant in it; "" is the folder itself."""
    if is_url(location):
        place = place_of_url(location, options)  # refuses what is no store
        if isinstance(place, LocalPlace):
            return _parted(place.name, options)
        whole = StoreFolder(location, options)
        if location.endswith("/") or (not _is_pattern(location) and whole.is_folder("")):
            return whole, ""
        root, _, name = location.rpartition("/")
        return StoreFolder(root, options), name
    path = Path(location).expanduser()
    if path.is_dir():
        return LocalFolder(path), ""
    return LocalFolder(path.parent), path.name


def _is_pattern(location: str) -> bool:
    return any(mark in location for mark in "*?{")


def _kind(error: QwenEditError) -> str:
    """The name of an error's class in `errors`, for other ranks to raise; some parts have classes of their own."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)


def _absolute(root: str) -> str:
    return root if is_url(root) else os.path.abspath(os.path.expanduser(root))


def _wait_for(path: Path, rank: int) -> None:
    until = time.monotonic() + _VISIBLE_SECONDS
    while not (path / HEADER).exists():
        if rank == 0 or time.monotonic() > until:
            raise DataError(
                f"rank {rank} does not see the index {shown(path)} that rank 0 has made; data.cache_dir must lie on a "
                "file system that all ranks share"
            )
        time.sleep(0.5)


class _Bar:
    """Bytes done and left, on the terminal's error stream, for what takes long."""

    def __init__(self, title: str) -> None:
        is_terminal = sys.stderr.isatty()
        self._bar = tqdm(
            desc=title, unit="B", unit_scale=True, delay=_SILENT_SECONDS, mininterval=0.5 if is_terminal else 30.0,
            dynamic_ncols=is_terminal, leave=False,
        )  # fmt: skip

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.close()

    def show(self, done: int, total: int) -> None:
        """Say how far it is."""
        self._bar.total = total
        self._bar.update(done - self._bar.n)
