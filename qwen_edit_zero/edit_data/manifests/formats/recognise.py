"""Which format a file or folder has, told by its content."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Sequence
from typing import Any

from qwen_edit_zero.edit_data.manifests.formats.base import Folder, Reader, name_of
from qwen_edit_zero.edit_data.manifests.formats.columns import ColumnMap, Columns, find_map, numbered, unused_note
from qwen_edit_zero.edit_data.manifests.formats.configs import (
    SeveralReaders,
    ai_toolkit_config,
    ai_toolkit_sets,
    loaded_config,
    musubi_config,
)
from qwen_edit_zero.edit_data.manifests.formats.csv_table import CsvTable, csv_header
from qwen_edit_zero.edit_data.manifests.formats.jsonl import OwnLines
from qwen_edit_zero.edit_data.manifests.formats.lines import head_of
from qwen_edit_zero.edit_data.manifests.formats.mapped import (
    diffsynth_array,
    diffsynth_csv,
    diffsynth_lines,
    lines_by_row,
    musubi_lines,
    told_lines,
)
from qwen_edit_zero.edit_data.manifests.formats.pairs import PICTURES, PairedFolders, PairedPictures
from qwen_edit_zero.edit_data.manifests.formats.parquet import ParquetTables
from qwen_edit_zero.edit_data.manifests.formats.webdataset import WebDatasetShards
from qwen_edit_zero.edit_data.wording import shown
from qwen_edit_zero.errors import DataError

FORMATS = ("jsonl", "diffsynth", "musubi", "ai_toolkit", "imagefolder", "parquet", "webdataset")
_METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet", "metadata.json")
_TARGETS = ("target", "targets", "edited", "output", "outputs", "after", "image", "images")
_CONTROLS = ("control", "source", "sources", "input", "inputs", "before", "reference", "original")
_TOML_TABLE = re.compile(rb"\[\[?\s*[A-Za-z_.-]+\s*\]")
_BRACES = re.compile(r"\{(\d+)\.\.(\d+)\}")


def open_reader(folder: Folder, name: str, *, form: str = "auto", told: Columns | None = None) -> Reader:
    """The reader of a manifest.

    Args:
        name: a file of the folder; "" for the folder itself; a pattern (`*`, `?`, `{000..099}`) for Parquet files or
            tar shards.
        form: one of `FORMATS`, or "auto" to tell by content.
        told: `data.columns`, for formats whose columns have no fixed names.

    Raises:
        DataError: it cannot be read, or is nothing that is known.
    """
    if any(mark in name for mark in "*?{") and not folder.is_file(name):
        reader = _of_files(folder, name, _matching(folder, name), form, told)
    elif name == "" or folder.is_folder(name):
        reader = _of_folder(folder, name, form, told)
    else:
        reader = _of_file(folder, name, form, told)
    if told and not reader.uses_columns:
        reader.given_notes.append("data.columns is not used, since the names of this format are fixed")
    return reader


def _of_file(folder: Folder, name: str, form: str, told: Columns | None) -> Reader:
    where = f"manifest {shown(name_of(folder, name))}"
    with folder.open(name) as file:
        begin = file.read(512)
    if form == "parquet" or (form == "auto" and begin[:4] == b"PAR1"):
        return ParquetTables(folder, [name], told)
    if form == "webdataset" or (form == "auto" and begin[257:262] == b"ustar"):
        return WebDatasetShards(folder, [name], told)
    if begin[:2] == b"\x1f\x8b":
        raise DataError(f"{where}: it is compressed (gzip); pictures cannot be reached in it: unpack it")
    head = head_of(folder, name)
    if form == "jsonl":
        _refuse_other_json(folder, name, head)
        return OwnLines(folder, name)
    stripped = head.lstrip()
    if form in ("auto", "musubi") and (name.lower().endswith(".toml") or _TOML_TABLE.match(stripped)):
        return musubi_config(folder, name)
    if stripped.startswith(b"["):
        return _of_array(folder, name, head, form)
    if stripped.startswith(b"{"):
        first = _first_object(head)
        if first is None and form in ("auto", "ai_toolkit", "musubi"):  # perhaps a job spread over many lines
            config = loaded_config(folder, name)
            if ai_toolkit_sets(config):
                return ai_toolkit_config(folder, name)
        if first is not None and ai_toolkit_sets(first) and "source" not in first:
            return ai_toolkit_config(folder, name)
        return _of_lines(folder, name, head, first, form, told)
    if form in ("auto", "musubi", "ai_toolkit"):
        config = loaded_config(folder, name)
        if isinstance(config, dict) and _is_musubi(config, form):
            return musubi_config(folder, name)
        if ai_toolkit_sets(config):
            return ai_toolkit_config(folder, name)
        if form == "musubi":
            return musubi_config(folder, name)
        if name.lower().endswith((".yaml", ".yml")) or form == "ai_toolkit":
            return ai_toolkit_config(folder, name)
    if name.lower().endswith((".csv", ".tsv")) or form in ("diffsynth", "imagefolder") or _looks_like_csv(head):
        return _of_csv(folder, name, form, told)
    _refuse_other_json(folder, name, head)
    return OwnLines(folder, name)  # its rows say what is wrong with them


def _of_lines(
    folder: Folder, name: str, head: bytes, first: dict[str, Any] | None, form: str, told: Columns | None
) -> Reader:
    keys = list(first or {})
    if form == "diffsynth":
        return diffsynth_lines(folder, name)
    if form == "musubi":
        return musubi_lines(folder, name)
    if form == "imagefolder" or (form == "auto" and _has_file_names(keys)):
        return imagefolder_lines(folder, name, keys, told)
    if form == "auto" and not {"source", "target"} & set(keys):
        if "image_path" in keys or numbered(keys, "control_path"):
            return musubi_lines(folder, name)
        if "edit_image" in keys or ("image" in keys and "prompt" in keys):
            return diffsynth_lines(folder, name)
        if told:
            return told_lines(folder, name, "JSONL", told, keys)
    _refuse_other_json(folder, name, head)
    return OwnLines(folder, name)


def _of_array(folder: Folder, name: str, head: bytes, form: str) -> Reader:
    first = _first_object(head.lstrip()[1:])
    if form == "diffsynth" or (first is not None and ("edit_image" in first or {"image", "prompt"} <= first.keys())):
        return diffsynth_array(folder, name)
    if first is not None and ai_toolkit_sets([first]):
        return ai_toolkit_config(folder, name)
    _refuse_other_json(folder, name, head)
    return OwnLines(folder, name)


def _of_csv(folder: Folder, name: str, form: str, told: Columns | None) -> Reader:
    names = csv_header(folder, name)
    if form == "imagefolder" or (form == "auto" and _has_file_names(names)):
        renamed, back = _without_suffixes(names)
        found = find_map(renamed, told=told, table=f"imagefolder {name}")
        return _told_csv(folder, name, "imagefolder metadata.csv", _renamed(found, back))
    if form == "diffsynth" or (not told and "image" in names and ("edit_image" in names or "prompt" in names)):
        return diffsynth_csv(folder, name)
    return _told_csv(folder, name, "CSV", find_map(names, told=told, table=f"CSV {name}"))


def _told_csv(folder: Folder, name: str, title: str, columns: ColumnMap) -> Reader:
    reader = CsvTable(folder, name, title, columns)
    reader.uses_columns = True
    return reader


def _of_folder(folder: Folder, name: str, form: str, told: Columns | None) -> Reader:
    where = f"folder {shown(name_of(folder, name) if name else folder.location)}"
    entries = folder.entries(name)
    files = [f"{name}/{e.name}" if name else e.name for e in entries if not e.is_folder]
    folders = [e.name for e in entries if e.is_folder]
    if form in ("auto", "imagefolder", "diffsynth"):
        found = [file for file in files if file.rsplit("/", 1)[-1] in _METADATA]
        if len(found) > 1:
            raise DataError(f"{where}: it has {' and '.join(map(shown, found))}; name the one that is meant")
        if found:
            return _of_file(folder, found[0], form, told)
    if form in ("auto", "ai_toolkit") and (pairs := _paired(folder, name, folders)):
        reader = PairedPictures(folder, "ai-toolkit folders", [pairs])
        used = {path.rsplit("/", 1)[-1] for path in (pairs.targets, *pairs.controls, pairs.masks or "")}
        reader.given_notes += unused_note(entry for entry in folders if entry not in used)
        return reader
    for kind, ending in (("parquet", ".parquet"), ("webdataset", ".tar")):
        if form in ("auto", kind):
            found = [file for file in files if file.lower().endswith(ending)]
            if not found and "data" in folders:  # as data sets of the Hub have them
                inner = f"{name}/data" if name else "data"
                found = [f"{inner}/{e.name}" for e in folder.entries(inner) if e.name.lower().endswith(ending)]
            if found:
                return _of_files(folder, name, found, kind, told)
    lines = [file for file in files if file.lower().endswith((".jsonl", ".csv", ".toml", ".yaml"))]
    hint = f"; name the file that is meant, such as {shown(lines[0])}" if lines else ""
    raise DataError(
        f"{where}: it is no set that is known: no metadata.jsonl or .csv, no .parquet, no .tar, no folder of targets "
        f"({', '.join(_TARGETS)}) beside folders of controls ({', '.join(f'{c}[_1]' for c in _CONTROLS)}){hint}"
    )


def _of_files(folder: Folder, pattern: str, names: Sequence[str], form: str, told: Columns | None) -> Reader:
    if not names:
        raise DataError(f"manifest {shown(name_of(folder, pattern))}: no file has such a name")
    with folder.open(names[0]) as file:
        begin = file.read(512)
    if form == "parquet" or (form == "auto" and begin[:4] == b"PAR1"):
        return ParquetTables(folder, names, told)
    if form == "webdataset" or (form == "auto" and begin[257:262] == b"ustar"):
        return WebDatasetShards(folder, names, told)
    readers = [_of_file(folder, name, form, told) for name in names]
    title = f"{readers[0].title} in {len(readers)} files"
    for name, reader in zip(names, readers, strict=True):
        reader.title = name
    several = SeveralReaders(folder, "", title, readers, [])
    several.uses_columns = all(reader.uses_columns for reader in readers)
    return several


def _matching(folder: Folder, pattern: str) -> list[str]:
    """Names of files for a pattern in the last part of a path; `{000..099}` counts, and each of them must be there."""
    parent, _, last = pattern.rpartition("/")
    brace = _BRACES.search(last)
    if brace:
        low, high = brace[1], brace[2]
        last_names = [
            f"{last[: brace.start()]}{number:0{len(low)}d}{last[brace.end() :]}"
            for number in range(int(low), int(high) + 1)
        ]
    else:
        last_names = [e.name for e in folder.entries(parent) if not e.is_folder and fnmatch.fnmatchcase(e.name, last)]
    return [f"{parent}/{name}" if parent else name for name in last_names]


def _paired(folder: Folder, name: str, folders: Sequence[str]) -> PairedFolders | None:
    lower = {entry.lower(): entry for entry in folders}
    target = next((lower[entry] for entry in _TARGETS if entry in lower), None)
    controls = next((found for stem in _CONTROLS if (found := numbered(lower, stem))), [])
    if target is None or not controls:
        return None

    def under(entry: str) -> str:
        return f"{name}/{entry}" if name else entry

    if not any(e.name.lower().endswith(PICTURES) for e in folder.entries(under(target))):
        return None
    mask = next((lower[entry] for entry in ("mask", "masks") if entry in lower), None)
    return PairedFolders(
        under(target), tuple(under(lower[entry]) for entry in controls), masks=under(mask) if mask else None
    )


def imagefolder_lines(folder: Folder, name: str, keys: Sequence[str], told: Columns | None) -> Reader:
    """metadata.jsonl of an imagefolder: `file_name`, `X_file_name` and `X_file_names` name pictures."""
    renamed, back = _without_suffixes(keys)
    found = find_map(renamed, told=told, table=f"imagefolder {name}")

    def columns(keys: Sequence[str]) -> ColumnMap:
        renamed, more = _without_suffixes(keys)
        return _renamed(found.for_row(renamed), {**back, **more})

    return lines_by_row(folder, name, "imagefolder metadata.jsonl", columns, _renamed(found, back).called)


def _without_suffixes(names: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Columns as `datasets` calls them (`file_name` is `image`, `a_file_name` is `a`), and how they are written."""
    back = {}
    for name in names:
        short = name
        for suffix, alone in (("file_names", "images"), ("file_name", "image")):
            if name == suffix:
                short = alone
            elif name.endswith(f"_{suffix}"):
                short = name.removesuffix(f"_{suffix}")
        back[short] = name
    return list(back), back


def _renamed(found: ColumnMap, back: dict[str, str]) -> ColumnMap:
    of = {key: back.get(column, column) for key, column in found.of.items()}
    sources = tuple(back.get(column, column) for column in found.sources)
    return ColumnMap(of, sources, {**found.called, **of, "source": sources[0]})


def _has_file_names(names: Sequence[str]) -> bool:
    return any(n in ("file_name", "file_names") or n.endswith(("_file_name", "_file_names")) for n in names)


def _is_musubi(config: dict[str, Any], form: str) -> bool:
    sets = config.get("datasets")
    return form == "musubi" or (
        isinstance(sets, list)
        and any(isinstance(s, dict) and any(k.startswith(("image_", "video_")) for k in s) for s in sets)
    )


def _first_object(head: bytes) -> dict[str, Any] | None:
    """The first JSON object of a text, on one line or over several; None if it is not whole."""
    try:
        value, _ = json.JSONDecoder().raw_decode(head.decode("utf-8", "replace").lstrip())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _looks_like_csv(head: bytes) -> bool:
    first = head.split(b"\n", 1)[0]
    return b"," in first and first.isascii() and bool(re.fullmatch(rb'[\w ",.-]+\r?', first))


def _refuse_other_json(folder: Folder, name: str, head: bytes) -> None:
    """JSON that is not one object a line is refused as a whole, with how to convert it."""
    lines = head.split(b"\n", 1)
    text = lines[0].strip()
    is_array = text.startswith(b"[") and (text == b"[" or (text.endswith((b",", b"]")) and b"{" in text))
    if text == b"{" or is_array:
        kind = "a JSON array" if text.startswith(b"[") else "an object spread over many lines"
        one_line = "jq -c '.[]'" if text.startswith(b"[") else "jq -c ."
        raise DataError(
            f"manifest {shown(name_of(folder, name))}: it is {kind}; JSONL has one object a line, whole. "
            f"Convert it with `{one_line} FILE > NEW.jsonl`"
        )
