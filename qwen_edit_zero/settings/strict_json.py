"""Read JSON strictly, so that every value knows its line.

The standard parser lets the last of two equal keys win, takes NaN, and says nothing of lines once it is done.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.files import read_text
from qwen_edit_zero.settings.layers import Layer

_BLANK = re.compile(r"[ \t\r\n]*")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?(?![0-9A-Za-z_.])")
_WORD = re.compile(r"[-+]?[A-Za-z_][A-Za-z0-9_]*")
_CONSTANTS = {"true": True, "false": False, "null": None}
_MAX_DEPTH = 50


def read_json(path: Path, *, shown: str) -> Layer:
    """Read a JSON object. Raises SettingsError naming `shown`:line for anything that is not strictly JSON."""
    return parse_json(read_text(path, shown=shown), shown=shown)


def parse_json(text: str, *, shown: str) -> Layer:
    """Return the values and places of the JSON object in `text`."""
    if not text.strip():
        raise SettingsError(f"{shown} is empty; a DeepSpeed JSON is an object such as {{...}}")
    parser = _Parser(text, shown)
    value = parser.whole()
    if not isinstance(value, dict):
        raise SettingsError(f"{shown} holds {json.dumps(value)[:40]}; a DeepSpeed JSON is an object such as {{...}}")
    return Layer(value, parser.places)


class _Parser:
    def __init__(self, text: str, shown: str) -> None:
        self.text, self.shown = text, shown
        self.at = 0
        self.places: dict[tuple[str, ...], str] = {}

    def place(self, at: int | None = None) -> str:
        return f"{self.shown}:{self.text.count(chr(10), 0, self.at if at is None else at) + 1}"

    def fail(self, what: str) -> SettingsError:
        return SettingsError(f"{self.place()}: {what}")

    def found(self) -> str:
        """What stands here, for a message."""
        return f"{self.text[self.at : self.at + 10]!r} follows" if self.at < len(self.text) else "the file ends"

    def skip(self) -> str:
        """Go to the next character that matters and return it; "" at the end."""
        match = _BLANK.match(self.text, self.at)
        assert match is not None
        self.at = match.end()
        found = self.text[self.at : self.at + 1]
        if found == "#" or self.text[self.at : self.at + 2] in ("//", "/*"):
            raise self.fail("JSON has no comments; remove this one")
        return found

    def whole(self) -> Any:
        value = self.value(())
        if self.skip():
            raise self.fail(f"there is more after the end of the object: {self.text[self.at : self.at + 20]!r}")
        return value

    def value(self, path: tuple[str, ...]) -> Any:
        if len(path) > _MAX_DEPTH:
            raise self.fail("this is nested too deeply for a settings file")
        char = self.skip()
        if char == "{":
            return self.object(path)
        if char == "[":
            return self.array(path)
        if char == '"':
            return self.string()
        if match := _NUMBER.match(self.text, self.at):
            self.at = match.end()
            number = float(match[0]) if match[1] or match[2] else int(match[0])
            if number in (float("inf"), float("-inf")):
                raise self.fail(f"{match[0]} is too large for a number")
            return number
        if match := _WORD.match(self.text, self.at):
            if match[0] in _CONSTANTS:
                self.at = match.end()
                return _CONSTANTS[match[0]]
            if match[0].lstrip("+-") in ("NaN", "Infinity", "inf", "nan"):
                raise self.fail(f"{match[0]} is not a number that JSON has")
            hint = f"; write {match[0].lower()}" if match[0].lower() in _CONSTANTS else ""
            raise self.fail(f"{match[0]} is not a JSON value{hint or '; texts stand in double quotes'}")
        if char in ("}", "]"):
            raise self.fail(f"a value is missing before {char!r} (JSON has no comma after the last one)")
        raise self.fail(f"a value was expected, but {self.found()}")

    def string(self) -> str:
        try:
            value, self.at = json.decoder.scanstring(self.text, self.at + 1, True)  # type: ignore[attr-defined]
        except json.JSONDecodeError as error:
            self.at = error.pos
            raise self.fail(error.msg[0].lower() + error.msg[1:]) from None
        return str(value)

    def array(self, path: tuple[str, ...]) -> list[Any]:
        values: list[Any] = []
        self.at += 1
        if self.skip() == "]":
            self.at += 1
            return values
        while True:
            values.append(self.value((*path, str(len(values)))))
            if self.end("]"):
                return values

    def object(self, path: tuple[str, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        self.at += 1
        if self.skip() == "}":
            self.at += 1
            return values
        while True:
            char = self.skip()
            if char != '"':
                hint = " (JSON has no comma after the last one)" if char == "}" else ""
                raise self.fail(f"a key in double quotes was expected, but {self.found()}{hint}")
            place = self.place()
            key = self.string()
            if key in values:
                first = self.places[*path, key]
                raise SettingsError(f"{place}: the key {key} is given a second time (first in {first}); keep one")
            self.places[*path, key] = place
            if self.skip() != ":":
                raise self.fail(f"a colon was expected after the key {key}")
            self.at += 1
            values[key] = self.value((*path, key))
            if self.end("}"):
                return values

    def end(self, closing: str) -> bool:
        """Step over the closing bracket or the comma; True if it was the bracket."""
        char = self.skip()
        if char not in (closing, ",") or not char:
            raise self.fail(f"',' or '{closing}' was expected, but {self.found()}")
        self.at += 1
        return char == closing
