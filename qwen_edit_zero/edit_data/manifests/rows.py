"""One row of a manifest: its keys and values, strictly checked, whatever format they came from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import orjson

from qwen_edit_zero.edit_data.manifests.names import NameRules, RowError, are_plain
from qwen_edit_zero.edit_data.wording import nearest, shown

KEYS = ("id", "source", "instruction", "target", "category", "weight", "split", "mask", "paraphrases")
OWN_NAMES = {key: key for key in KEYS}
_REQUIRED = ("source", "instruction", "target")
_LARGEST_WEIGHT, _SMALLEST_WEIGHT = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)


class Row(NamedTuple):
    """The values of a row, checked; names are normalised and lie where the rules allow.

    The order of the fields is that of the records of an index (`index.py`): a change needs a new index version.
    """

    id: str | None
    sources: tuple[str, ...]
    instruction: str
    target: str
    category: str | None = None
    weight: float = 1.0
    split: str | None = None
    mask: str | None = None
    paraphrases: tuple[str, ...] = ()


def parse_row(raw: bytes, rules: NameRules, *, max_references: int) -> Row:
    """Check the bytes of one JSON line, without its line end. Raises RowError saying what is wrong."""
    return _quick_row(raw, max_references) or check_row(parse_object(raw), rules, max_references=max_references)


def parse_object(raw: bytes) -> dict[str, Any]:
    """The JSON object of a line; what RFC 8259 leaves open (keys twice, NaN) is refused. Raises RowError."""
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
    except RowError:
        raise
    except ValueError:  # Python converts no integer of over 4300 digits
        raise RowError("it holds a number with thousands of digits") from None
    if not isinstance(value, dict):
        raise RowError(f"it is {kind_of_value(value)}, not a JSON object")
    return value


def check_row(
    values: Mapping[str, Any], rules: NameRules, *, max_references: int, called: Mapping[str, str] = OWN_NAMES
) -> Row:
    """Check the values of a row under our keys; None counts as absent. Raises RowError saying what is wrong.

    `called` says how messages call each key of ours: the user's own column, where the row comes from another format.
    """
    for key in values:
        if key not in KEYS:
            near = nearest(key, KEYS)
            hint = f"did you mean {shown(near)}?" if near else f"the keys are {', '.join(KEYS)}"
            raise RowError(f"unknown key {shown(key)}; {hint}")
    get, name = values.get, called
    for key in _REQUIRED:
        if get(key) is None:
            raise RowError(f"{shown(name[key])} is missing")

    def text(key: str) -> str | None:
        return None if get(key) is None else _text(get(key), name[key])

    mask = text("mask")
    return Row(
        _id(get("id"), name["id"]),
        _sources(get("source"), rules, max_references, name["source"]),
        _text(get("instruction"), name["instruction"]),
        rules.check(_text(get("target"), name["target"]), name["target"]),
        text("category"),
        _weight(get("weight"), name["weight"]),
        text("split"),
        None if mask is None else rules.check(mask, name["mask"]),
        _paraphrases(get("paraphrases"), name["paraphrases"]),
    )


def kind_of_value(value: Any) -> str:
    """What a JSON value is, in words."""
    names = {dict: "an object", list: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def _quick_row(raw: bytes, max_references: int) -> Row | None:
    """As `parse_row` for a row in which nothing is odd; None where anything may be, for the exact way to decide.

    A key that stands twice is found by counting quotes: what the parsed object holds must account for all of them.
    """
    if b"\\\\" in raw:
        return None
    try:
        values = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None
    if type(values) is not dict:
        return None
    get = values.get
    strings = len(values)  # its keys

    source, instruction, target = get("source"), get("instruction"), get("target")
    if type(source) is str:
        source = (source,)
    elif type(source) is not list:
        return None
    if type(instruction) is not str or type(target) is not str or not 0 < len(source) <= max_references:
        return None
    strings += len(source) + 2
    known = 3

    id_ = get("id")
    if id_ is not None:
        known += 1
        if type(id_) is int:
            id_ = str(id_)
        elif type(id_) is not str or not id_.strip():
            return None
        else:
            strings += 1
    category = get("category")
    if category is not None:
        known += 1
        strings += 1
        if type(category) is not str or not category.strip():
            return None
    weight = get("weight")
    if weight is None:
        weight = 1.0
    else:
        known += 1
        if type(weight) is not float and type(weight) is not int:
            return None
        weight = float(weight)
        if not _SMALLEST_WEIGHT <= weight <= _LARGEST_WEIGHT:
            return None
    split = get("split")
    if split is not None:
        known += 1
        strings += 1
        if type(split) is not str or not split.strip():
            return None
    mask = get("mask")
    if mask is not None:
        known += 1
        strings += 1
        if type(mask) is not str:
            return None

    if known != len(values):  # paraphrases, nulls, unknown keys
        return None
    if raw.count(b'"') != 2 * strings + raw.count(b'\\"') or not instruction.strip():
        return None
    try:
        names = f"/{target}/{'/'.join(source)}" if mask is None else f"/{target}/{mask}/{'/'.join(source)}"
    except TypeError:
        return None
    if not are_plain(names):
        return None
    return tuple.__new__(Row, (id_, tuple(source), instruction, target, category, weight, split, mask, ()))


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


def _id(value: Any, key: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return _text(value, key)


def _sources(value: Any, rules: NameRules, most: int, key: str) -> tuple[str, ...]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        raise RowError(f"{shown(key)} is {kind_of_value(value)}, not a file name or a list of them")
    if not value:
        raise RowError(f"{shown(key)} is an empty list; an edit needs at least one reference picture")
    if len(value) > most:
        raise RowError(f"{shown(key)} has {len(value)} pictures; at most {most} are taken (data.max_references)")
    return tuple(rules.check(_text(item, key), key) for item in value)


def _paraphrases(value: Any, key: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise RowError(f"{shown(key)} is {kind_of_value(value)}, not a list of texts")
    return tuple(_text(item, key) for item in value)


def _text(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise RowError(f"{shown(key)} is {kind_of_value(value)}, not text")
    if not value.strip():
        raise RowError(f"{shown(key)} is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RowError(f"{shown(key)} holds half of a surrogate pair, which is no character") from None
    return value


def _weight(value: Any, key: str) -> float:
    if value is None:
        return 1.0
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RowError(f"{shown(key)} is {kind_of_value(value)}, not a number")
    try:
        weight = float(value)
    except OverflowError:
        weight = math.inf
    if not math.isfinite(weight) or weight <= 0:
        raise RowError(
            f"{shown(key)} is {value}; it must be a finite number over 0 (leave out rows that must not count)"
        )
    if not _SMALLEST_WEIGHT <= weight <= _LARGEST_WEIGHT:
        raise RowError(f"{shown(key)} is {value}; it must be between {_SMALLEST_WEIGHT:.0e} and {_LARGEST_WEIGHT:.0e}")
    return weight
