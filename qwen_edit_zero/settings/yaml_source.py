"""Read YAML recipes so that every value knows its line and nothing is guessed.

Scalars follow the YAML 1.2 core schema: `1e-5` is a number, `yes`, `on` and `010` are not what YAML 1.1 makes of them.
A key given twice is an error, and so are tags and non-text keys.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.files import read_text
from qwen_edit_zero.settings.layers import Layer

_DATA_SUFFIXES = (".jsonl", ".csv", ".parquet", ".tar")
_MAX_VALUES = 20_000  # aliases may multiply values; a recipe has a few hundred
_NULL, _BOOL, _INT, _FLOAT, _STR = (f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str"))
_PATTERNS = {
    _NULL: r"~|null|Null|NULL|",
    _BOOL: r"true|True|TRUE|false|False|FALSE",
    _INT: r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+",
    _FLOAT: r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
}


class CoreSchemaLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the scalars of YAML 1.2."""

    yaml_implicit_resolvers: dict[str, Any] = {}


class CoreSchemaDumper(yaml.SafeDumper):
    """The counterpart of CoreSchemaLoader: quotes exactly the texts that it would read as something else."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def ignore_aliases(self, data: Any) -> bool:
        """Values are written out each time."""
        return True


for _tag, _pattern in _PATTERNS.items():
    for _class in (CoreSchemaLoader, CoreSchemaDumper):
        _class.add_implicit_resolver(_tag, re.compile(f"^(?:{_pattern})$"), None)


def plain_scalar(text: str) -> Any:
    """The value of an unquoted YAML scalar: None, a bool, a number or the text itself."""
    tag = next((t for t, pattern in _PATTERNS.items() if re.fullmatch(pattern, text)), _STR)
    return _scalar(tag, text)


def _scalar(tag: str, text: str) -> Any:
    if tag == _NULL:
        return None
    if tag == _BOOL:
        return text.lower() == "true"
    if tag == _INT:
        return int(text, {"0o": 8, "0x": 16}.get(text[:2], 10))
    if tag == _FLOAT:
        return float(re.sub(r"\.(inf|nan)$", r"\1", text.lower()))
    return text


class _Builder:
    """Turns YAML nodes into plain values, noting the place of each."""

    def __init__(self, shown: str, most: int) -> None:
        self.shown, self.most = shown, most
        self.places: dict[tuple[str, ...], str] = {}
        self.open: list[yaml.Node] = []
        self.count = 0

    def place(self, node: yaml.Node) -> str:
        return f"{self.shown}:{node.start_mark.line + 1}"

    def value(self, node: yaml.Node, path: tuple[str, ...]) -> Any:
        self.count += 1
        if self.count > self.most or any(node is outer for outer in self.open):
            raise SettingsError(f"{self.place(node)}: aliases repeat values without end; write them out")
        self.open.append(node)
        try:
            if isinstance(node, yaml.ScalarNode):
                if node.tag not in (_NULL, _BOOL, _INT, _FLOAT, _STR):
                    raise SettingsError(f"{self.place(node)}: the tag {node.tag} is not supported; write a plain value")
                return _scalar(node.tag, node.value)
            if node.tag not in ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq"):
                raise SettingsError(f"{self.place(node)}: the tag {node.tag} is not supported; write a plain value")
            if isinstance(node, yaml.SequenceNode):
                for i, item in enumerate(node.value):
                    self.places[*path, str(i)] = self.place(item)
                return [self.value(item, (*path, str(i))) for i, item in enumerate(node.value)]
            assert isinstance(node, yaml.MappingNode)
            return self.mapping(node, path)
        finally:
            self.open.pop()

    def mapping(self, node: yaml.MappingNode, path: tuple[str, ...]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        lines: dict[str, str] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode) or key_node.tag != _STR:
                shown = key_node.value if isinstance(key_node, yaml.ScalarNode) else "a list or mapping"
                raise SettingsError(
                    f"{self.place(key_node)}: the key {shown} is not a text; keys are names of settings"
                )
            key, place = key_node.value, self.place(key_node)
            if key in result:
                raise SettingsError(f"{place}: the key {key} is given a second time (first in {lines[key]}); keep one")
            lines[key] = place
            self.places[*path, key] = place
            result[key] = self.value(value_node, (*path, key))
        return result


def parse_yaml(text: str, *, shown: str) -> Any:
    """Return the plain value that `text` (one YAML document) stands for. Raises SettingsError naming `shown`:line."""
    return _build(text, shown)[0]


def read_yaml(path: Path, *, shown: str) -> Layer:
    """Read a recipe. Raises SettingsError naming `shown`:line if it is not one mapping in UTF-8 YAML."""
    if path.suffix.lower() in _DATA_SUFFIXES:
        raise SettingsError(f"{shown} is no recipe, which is YAML; a data set is given as data.manifest={shown}")
    value, places = _build(read_text(path, shown=shown), shown)
    if value is None:
        raise SettingsError(f"{shown} is empty; a recipe is a mapping with sections such as run, model and data")
    if not isinstance(value, dict):
        found = "a list" if isinstance(value, list) else f"the single value {value!r:.60}"
        raise SettingsError(f"{shown} holds {found}; a recipe is a mapping with sections such as run, model and data")
    return Layer(value, places)


def parse_with_places(text: str, *, shown: str, most_values: int) -> tuple[Any, dict[tuple[str, ...], str]]:
    """The plain value of one YAML document, and `shown`:line of every key and list item in it, by its path.

    Raises SettingsError naming `shown`:line, also if there are more than `most_values` values, which aliases may make
    of few lines.
    """
    return _build(text, shown, most_values)


def _build(text: str, shown: str, most: int = _MAX_VALUES) -> tuple[Any, dict[tuple[str, ...], str]]:
    try:
        node = yaml.compose(text, Loader=CoreSchemaLoader)
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise SettingsError(f"{shown}:{line}: the character #x{error.character:04x} cannot be in YAML") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"{shown}:{mark.line + 1}" if mark else shown
        problem = " ".join(part for part in (error.context, error.problem) if part)
        hint = ""
        if "'\\t'" in problem:
            hint = "; YAML is indented with blanks, not tabs"
        elif "undefined alias" in problem or "alias" in (error.context or ""):
            hint = "; put a text that begins with * in quotes"
        elif "expected a single document" in problem:
            hint = "; a recipe is one document"
        raise SettingsError(f"{place}: this is not YAML: {problem}{hint}") from None
    except RecursionError:
        raise SettingsError(f"{shown} is nested too deeply for a settings file") from None
    if node is None:
        return None, {}
    builder = _Builder(shown, most)
    try:
        return builder.value(node, ()), builder.places
    except RecursionError:
        raise SettingsError(f"{shown} is nested too deeply for a settings file") from None
