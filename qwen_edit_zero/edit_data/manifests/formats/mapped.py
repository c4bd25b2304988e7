"""Formats with fixed keys: DiffSynth-Studio's metadata and musubi-tuner's JSON Lines."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from qwen_edit_zero.edit_data.manifests.formats.base import Folder, Reader
from qwen_edit_zero.edit_data.manifests.formats.columns import ColumnMap, Columns, find_map, fixed_map, numbered
from qwen_edit_zero.edit_data.manifests.formats.csv_table import CsvTable, csv_header
from qwen_edit_zero.edit_data.manifests.formats.jsonl import Convert, MappedArray, MappedLines
from qwen_edit_zero.edit_data.manifests.names import RowError

DIFFSYNTH = ("image", ("edit_image",), "prompt")


def diffsynth_csv(folder: Folder, name: str) -> Reader:
    """DiffSynth's metadata.csv: `image` is the target, `edit_image` the reference."""
    columns = fixed_map(*DIFFSYNTH, names=csv_header(folder, name))
    return CsvTable(folder, name, f"DiffSynth {_last(name)}", columns)


def diffsynth_lines(folder: Folder, name: str) -> Reader:
    """DiffSynth's metadata.jsonl: as the CSV, and `edit_image` may be a list."""
    return MappedLines(folder, name, f"DiffSynth {_last(name)}", _by_row(_diffsynth), _diffsynth(()).called)


def diffsynth_array(folder: Folder, name: str) -> Reader:
    """DiffSynth's metadata.json: an array of the objects of metadata.jsonl."""
    return MappedArray(folder, name, f"DiffSynth {_last(name)}", _by_row(_diffsynth), _diffsynth(()).called)


def musubi_lines(folder: Folder, name: str, *, weight: float = 1.0) -> Reader:
    """musubi-tuner's JSON Lines: `image_path`, `control_path` or `control_path_0`, `control_path_1` ..., `caption`."""

    def columns(names: Sequence[str]) -> ColumnMap:
        several = [key for key in names if key.startswith("image_path_") and key != "image_path_0"]
        if several:
            raise RowError(f'it has several targets ("image_path" and "{several[0]}"); a sample has one')
        target = "image_path_0" if "image_path_0" in names and "image_path" not in names else "image_path"
        controls = numbered(names, "control_path") or ["control_path"]
        return fixed_map(target, controls, "caption", names=names)

    convert = _by_row(columns)

    def with_weight(cells: dict[str, Any]) -> tuple[Mapping[str, Any], set[str]]:
        values, used = convert(cells)
        own = values.get("weight", 1.0)
        if weight == 1.0 or isinstance(own, bool) or not isinstance(own, int | float):
            return values, used
        return {**values, "weight": own * weight}, used

    return MappedLines(folder, name, f"musubi-tuner {_last(name)}", with_weight, columns(()).called)


def told_lines(folder: Folder, name: str, title: str, told: Columns | None, first: Sequence[str]) -> Reader:
    """JSON Lines whose keys are known only from the first row and from `data.columns`."""
    found = find_map(first, told=told, table=f"{title} {_last(name)}")

    return lines_by_row(folder, name, title, found.for_row, found.called)


def lines_by_row(
    folder: Folder, name: str, title: str, columns: Callable[[Sequence[str]], ColumnMap], called: Mapping[str, str]
) -> Reader:
    """JSON Lines whose map `columns` makes for the keys of a row, by a map for the first one."""
    reader = MappedLines(folder, name, title, _by_row(columns), called)
    reader.uses_columns = True
    return reader


def _diffsynth(names: Sequence[str]) -> ColumnMap:
    return fixed_map(*DIFFSYNTH, names=names)


def _by_row(columns: Callable[[Sequence[str]], ColumnMap]) -> Convert:
    """A conversion whose map depends on the keys of the row; few different sets of keys come in one file."""
    maps: dict[tuple[str, ...], ColumnMap] = {}

    def convert(cells: dict[str, Any]) -> tuple[Mapping[str, Any], set[str]]:
        names = tuple(cells)
        found = maps.get(names)
        if found is None:
            found = columns(names)
            if len(maps) < 1000:
                maps[names] = found
        return found.values(cells), found.used()

    return convert


def _last(name: str) -> str:
    return name.rsplit("/", 1)[-1]
