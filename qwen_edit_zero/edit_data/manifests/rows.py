"""One row of a manifest: strict parsing of its JSON, its keys and values, and the rules for file names in it."""

from __future__ import annotations

import json
import math
import posixpath
import re
from typing import Any, NamedTuple

from qwen_edit_zero.edit_data.wording import nearest, shown

KEYS = ("id", "source", "instruction", "target", "category", "weight")

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://")
_DRIVE = re.compile(r"[A-Za-z]:[\\/]")


class RowError(ValueError):
    """What is wrong with a row, without its place."""


class Row(NamedTuple):
    """The values of a row, checked; names are normalised and lie under the manifest's folder."""

    id: str | None
    sources: tuple[str, ...]
    instruction: str
    target: str
    category: str | None
    weight: float


def parse_row(raw: bytes, *, max_references: int) -> Row:
    """Check the bytes of one line, without its line end. Raises RowError saying what is wrong."""
    row = _parse_object(raw)
    for key in row:
        if key not in KEYS:
            near = nearest(key, KEYS)
            hint = f"did you mean {shown(near)}?" if near else f"the keys are {', '.join(KEYS)}"
            raise RowError(f"unknown key {shown(key)}; {hint}")
    for key in ("source", "instruction", "target"):
        if row.get(key) is None:
            raise RowError(f"{shown(key)} is missing")
    return Row(
        _id(row.get("id")),
        _sources(row["source"], max_references),
        _text(row["instruction"], "instruction"),
        _name(row["target"], "target"),
        None if row.get("category") is None else _text(row["category"], "category"),
        _weight(row.get("weight")),
    )


def _parse_object(raw: bytes) -> dict[str, Any]:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise RowError(
            f"byte {error.start + 1} of the line (0x{raw[error.start]:02X}) is not UTF-8; save the file as UTF-8"
        ) from None
    try:
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
    except RecursionError:
        raise RowError("its JSON is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise RowError(_json_problem(text, error)) from None
    if not isinstance(value, dict):
        raise RowError(f"it is {_kind(value)}, not a JSON object")
    return value


def _json_problem(text: str, error: json.JSONDecodeError) -> str:
    if error.msg == "Extra data":
        return f"there is more after the JSON object, at column {error.pos + 1}; one object a line"
    if text.lstrip().startswith(("#", "//")):
        return "it is a comment, and JSON has none; delete the line"
    if not text.rstrip().endswith("}"):
        return f"it is not a whole JSON object (it ends with {shown(text[-12:])}): was the file cut short?"
    return f"it is not JSON: {error.msg} at column {error.pos + 1}"


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in pairs:
        if key in result:
            raise RowError(f"the key {shown(key)} stands in it twice")
        result[key] = value
    return result


def _constant(name: str) -> float:
    raise RowError(f"{name} is no JSON number")


def _id(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return _text(value, "id")


def _sources(value: Any, most: int) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        raise RowError(f'"source" is {_kind(value)}, not a file name or a list of them')
    if not value:
        raise RowError('"source" is an empty list; an edit needs at least one reference picture')
    if len(value) > most:
        raise RowError(f'"source" has {len(value)} pictures; at most {most} are taken (data.max_references)')
    return tuple(_name(item, "source") for item in value)


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{shown(key)} is {_kind(value)}, not text")
    if not value.strip():
        raise RowError(f"{shown(key)} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RowError(f"{shown(key)} holds half of a surrogate pair, which is no character") from None
    return value


def _name(value: Any, key: str) -> str:
    """A file name under the manifest's folder, `.` and `..` resolved; taken literally, without URL decoding."""
    name = _text(value, key)
    problem = None
    if "\0" in name:
        problem = "it holds a NUL character"
    elif _URL.match(name):
        problem = "it is a URL, and nothing is fetched; download the file and give its relative path"
    elif _DRIVE.match(name):
        problem = "it is a Windows path with a drive; paths are relative to the manifest's folder"
    elif name.startswith("/"):
        problem = "it is an absolute path; paths are relative to the manifest's folder"
    elif name == "~" or name.startswith("~/"):
        problem = "it is in a home folder; paths are relative to the manifest's folder"
    else:
        name = posixpath.normpath(name)
        if name == ".." or name.startswith("../"):
            problem = "it leads out of the manifest's folder; put the manifest above all of its pictures"
    if problem:
        raise RowError(f"{shown(key)} {shown(value)}: {problem}")
    return name


def _weight(value: Any) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RowError(f'"weight" is {_kind(value)}, not a number')
    try:
        weight = float(value)
    except OverflowError:
        weight = math.inf
    if not math.isfinite(weight) or weight <= 0:
        raise RowError(f'"weight" is {value}; it must be a finite number over 0 (leave out rows that must not count)')
    return weight


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
