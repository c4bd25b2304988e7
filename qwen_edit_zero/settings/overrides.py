"""Dotted settings of the command line: `section.key=value`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.layers import Layer
from qwen_edit_zero.settings.names import SHORT_FORMS
from qwen_edit_zero.settings.yaml_source import parse_yaml, plain_scalar

_OVERRIDE = re.compile(r"^([A-Za-z_][A-Za-z0-9_]*(?:\.[A-Za-z_0-9]+)*)=(.*)$", re.DOTALL)


def is_override(argument: str) -> bool:
    """Whether a command line argument has the form `section.key=value`."""
    return _OVERRIDE.match(argument) is not None


def parse_overrides(arguments: Sequence[str]) -> Layer:
    """Return the settings said by `arguments`; the last one wins where a key is given twice.

    Values are YAML: `optimizer.lr=1e-5` is a number, `model.freeze=["*.img_mod.*"]` a list, `model.lora=null` nothing.
    A value that begins with no bracket or quote is one scalar, whatever is in it.
    """
    layer = Layer()
    for argument in arguments:
        match = _OVERRIDE.match(argument)
        if match is None:
            raise SettingsError(f"{argument!r} is not of the form section.key=value")
        path, text = tuple(match[1].split(".")), match[2].strip()
        if not text:
            raise SettingsError(f"{argument!r} gives no value; write {match[1]}=null to unset it, or {match[1]}='\"\"'")
        value = _value(text, argument)
        if isinstance(value, str) and len(path) == 1 and path[0] in SHORT_FORMS:
            path = (path[0], SHORT_FORMS[path[0]])
        layer.put(path, value, "override")
    return layer


def _value(text: str, argument: str) -> Any:
    if text[0] in "[{\"'":
        return parse_yaml(text, shown=f"override {argument}")
    return plain_scalar(text)
