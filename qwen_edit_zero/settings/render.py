"""Write settings as YAML that can be read as a recipe again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from qwen_edit_zero.settings.load import LoadedSettings
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.settings.yaml_source import CoreSchemaDumper


def settings_yaml(loaded: LoadedSettings, *, show_sources: bool = True) -> str:
    """Return all settings as YAML, each with its source in a comment behind it if `show_sources`."""
    values = plain(loaded.settings)
    lines = _lines(values, (), loaded.sources if show_sources else {})
    if show_sources:
        width = max((len(text) for text, _ in lines if len(text) <= 60), default=0)
        return "".join(f"{text:<{width}}  # {source}\n" if source else f"{text}\n" for text, source in lines)
    return "".join(f"{text}\n" for text, _ in lines)


def plain(settings: Settings) -> dict[str, Any]:
    """Settings as nested dicts of numbers, texts and lists: what JSON and YAML can hold."""
    return settings.model_dump(mode="json")


def _lines(values: Mapping[str, Any], path: tuple[str, ...], sources: Mapping[str, str]) -> list[tuple[str, str]]:
    lines: list[tuple[str, str]] = []
    indent = "  " * len(path)
    for key, value in values.items():
        at = (*path, key)
        if isinstance(value, dict) and value:
            lines.append((f"{indent}{key}:", ""))
            lines += _lines(value, at, sources)
        else:
            lines.append((f"{indent}{key}: {inline(value)}", sources.get(".".join(at), "")))
    return lines


def inline(value: Any) -> str:
    """A value in YAML, on one line."""
    text: str = yaml.dump(value, Dumper=CoreSchemaDumper, default_flow_style=True, allow_unicode=True, width=10**9)
    return text.removesuffix("\n").removesuffix("\n...")
