"""Turn what pydantic finds wrong into lines that say where, what was found and what is needed."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from pydantic import ValidationError

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.layers import Layer, Path, dotted
from qwen_edit_zero.settings.names import hint_for_unknown, known_names

_NEEDS = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "a text",
    "path_type": "a path",
    "tuple_type": "a list, such as [a, b]",
    "list_type": "a list, such as [a, b]",
    "dict_type": "a mapping",
    "model_type": "a section, that is a mapping of settings",
    "model_attributes_type": "a section, that is a mapping of settings",
    "finite_number": "a finite number",
}
_BOUNDS = {
    "greater_than": ("gt", "greater than"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "less than"),
    "less_than_equal": ("le", "at most"),
}


def shown_value(value: Any) -> str:
    """A value as a recipe would have it, cut short."""
    text = (
        json.dumps(value, ensure_ascii=False) if isinstance(value, (str, bool, dict, list, type(None))) else str(value)
    )
    return text if len(text) <= 60 else text[:57] + "..."


def in_words(choices: Sequence[str]) -> str:
    """`1, 2 or 3`."""
    return " or ".join(part for part in (", ".join(choices[:-1]), choices[-1]) if part)


def raise_listed(problems: Sequence[str], what: str) -> None:
    """Raise one SettingsError that lists all `problems`, if there are any."""
    if not problems:
        return
    unique = list(dict.fromkeys(problems))
    if len(unique) == 1:
        raise SettingsError(unique[0])
    raise SettingsError(f"{what}: {len(unique)} things are wrong\n" + "\n".join(f"  {problem}" for problem in unique))


def describe(error: ValidationError, layer: Layer) -> list[str]:
    """One line a wrong value, in the order of the file; several complaints about one value become one line."""
    names = known_names()
    found: dict[Path, tuple[Any, list[str], bool]] = {}
    for item in error.errors(include_url=False):
        path = _path_in_settings(item["loc"][:-1] if item["type"] == "missing" else item["loc"], names)
        if item["type"] == "extra_forbidden":
            found[path] = (item["input"], [hint_for_unknown(path)], True)
            continue
        value, needs, unknown = found.setdefault(path, (item["input"], [], False))
        if (need := _need(item, value)) not in needs:
            needs.append(need)
    lines = []
    for path, (value, needs, unknown) in found.items():
        place = layer.place(path)
        where = f"{place}: " if place else ""
        if unknown:
            lines.append((_order(place), f"{where}{dotted(path)} is not a setting; {needs[0]}"))
        elif path:
            lines.append(
                (_order(place), f"{where}{dotted(path)} is {shown_value(value)}; it must be {' or '.join(needs)}")
            )
        else:
            lines.append((_order(place), needs[0]))
    return [line for _, line in sorted(lines, key=lambda pair: pair[0])]


def _order(place: str | None) -> tuple[bool, str, int]:
    """Files first, line by line; then the command line."""
    match = re.fullmatch(r"(.*):(\d+)", place or "")
    return (False, match[1], int(match[2])) if match else (True, place or "", 0)


def _path_in_settings(loc: tuple[int | str, ...], names: dict[Path, bool]) -> Path:
    """`loc` without the parts that pydantic adds for the members of a union."""
    path: Path = ()
    for part in loc:
        if path in names and not names[path] and isinstance(part, str):
            break
        path = (*path, str(part))
    return path


def _need(item: Any, value: Any) -> str:
    kind, context = item["type"], item.get("ctx", {})
    if kind == "literal_error":
        return str(context["expected"]).replace("'", "")
    if kind in _BOUNDS:
        key, words = _BOUNDS[kind]
        return f"{words} {context[key]:g}" if isinstance(context[key], float) else f"{words} {context[key]}"
    if kind in ("too_short", "too_long"):
        length = context.get("min_length", context.get("max_length"))
        return f"a list of {length} values, not {context['actual_length']}"
    if kind == "missing":
        return f"a list of at least {item['loc'][-1] + 1} values" if isinstance(item["loc"][-1], int) else "given"
    if kind == "string_pattern_mismatch":
        return "letters, digits, '.', '_' and '-', beginning with a letter or digit"
    if kind == "value_error":
        return str(context.get("error", item["msg"]))
    need = _NEEDS.get(kind)
    if need is None:
        return str(item["msg"])
    if isinstance(value, str) and kind.startswith(("int", "float", "bool")):
        return f"{need}, and it is a text" + (" (leave out the quotes)" if _is_number(value) else "")
    if kind == "int_type" and isinstance(value, float) and value.is_integer():
        return f"{need}: write {int(value)}"
    if kind in ("tuple_type", "list_type") and isinstance(value, str):
        return f"a list: write [{value}]" if re.fullmatch(r"[\w./-]+", value) else f'a list: write ["{value}"]'
    return need


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
