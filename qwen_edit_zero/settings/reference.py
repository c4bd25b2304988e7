"""The tables of docs/settings.md, made from the models: `python -m qwen_edit_zero.settings.reference docs/settings.md`.

The meaning of a setting is the comment on its line (or above it) in models.py.
"""

from __future__ import annotations

import ast
import io
import json
import re
import sys
import tokenize
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from qwen_edit_zero.settings import models
from qwen_edit_zero.settings.names import section_of

BEGIN, END = "<!-- settings: begin -->", "<!-- settings: end -->"
_PLAIN = {int: "whole number", float: "number", str: "text", bool: "true or false", Path: "path", type(None): "null"}
_BOUNDS = ((Ge, "ge", ">="), (Gt, "gt", ">"), (Le, "le", "<="), (Lt, "lt", "<"))


def reference() -> str:
    """All settings as Markdown, a table a section."""
    meanings = _meanings(Path(models.__file__).read_text(encoding="utf-8"))
    parts: list[str] = []
    for name, field in models.Settings.model_fields.items():
        model = section_of(field.annotation)
        assert model is not None, f"{name} is no section"
        parts += _table(name, model, meanings)
    return "\n".join(parts)


def with_reference(document: str) -> str:
    """`document` with the tables between its two marks made anew."""
    before, _, rest = document.partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert mark, f"the document lacks the lines {BEGIN} and {END}"
    return f"{before}{BEGIN}\n\n{reference()}\n{END}{after}"


def _table(name: str, model: type[BaseModel], meanings: dict[tuple[str, str], str]) -> list[str]:
    lines = [f"### {name}", "", (model.__doc__ or "").split("\n\n")[0], ""]
    lines += ["| setting | value | default | meaning |", "|---|---|---|---|"]
    deeper: list[str] = []
    for key, field in model.model_fields.items():
        section = section_of(field.annotation)
        if section is not None:
            deeper += ["", *_table(f"{name}.{key}", section, meanings)]
            optional = type(None) in get_args(field.annotation)
            value = f"section `{name}.{key}`" + (", or null" if optional else "")
        else:
            value = _type(field.annotation, field)
        meaning = meanings.get((model.__name__, key), "")
        lines.append(f"| `{name}.{key}` | {value} | {_default(field)} | {meaning} |".replace("||", "| |"))
    return [*lines, *deeper, *([] if "." in name else [""])]


def _default(field: FieldInfo) -> str:
    value = field.default
    if isinstance(value, BaseModel):
        return "as below"
    value = list(value) if isinstance(value, tuple) else str(value) if isinstance(value, Path) else value
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def _type(annotation: Any, field: FieldInfo | None = None) -> str:
    if get_origin(annotation) is Literal:
        return ", ".join(f"`{choice}`" for choice in get_args(annotation))
    metadata = list(field.metadata) if field is not None else []
    if hasattr(annotation, "__metadata__"):
        for item in annotation.__metadata__:
            metadata += item.metadata if isinstance(item, FieldInfo) else [item]
        annotation = annotation.__origin__
    bounds = [f" {sign} {getattr(item, key)}" for item in metadata for kind, key, sign in _BOUNDS if type(item) is kind]
    if annotation in _PLAIN:
        return _PLAIN[annotation] + ",".join(bounds)
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is tuple and arguments[-1] is Ellipsis:
        return "list of texts"
    if origin is tuple:
        return f"list of {len(arguments)}: {_type(arguments[0])}"
    if origin is dict:
        return "mapping"
    return " or ".join(_type(part) for part in arguments)


def _meanings(source: str) -> dict[tuple[str, str], str]:
    comments = {
        token.start[0]: (token.string.lstrip("# ").strip(), token.line.lstrip().startswith("#"))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT and "fmt:" not in token.string
    }
    found: dict[tuple[str, str], str] = {}
    for node in ast.parse(source).body:
        for statement in node.body if isinstance(node, ast.ClassDef) else []:
            if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)):
                continue
            assert isinstance(node, ast.ClassDef)
            text = comments.get(statement.lineno, ("", False))[0]
            above = comments.get(statement.lineno - 1, ("", False))
            text = text or (above[0] if above[1] else "")
            for python, yaml in (("None", "null"), ("False", "false"), ("True", "true"), (r"\|", r"\\|")):
                text = re.sub(rf"(?<!\w){python}(?!\w)", yaml, text)
            found[node.name, statement.target.id] = text
    return found


if __name__ == "__main__":
    document = Path(sys.argv[1])
    document.write_text(with_reference(document.read_text(encoding="utf-8")), encoding="utf-8")
