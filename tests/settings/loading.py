"""Write recipes and DeepSpeed JSONs for tests, and load them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.load import LoadedSettings, load_settings

MINIMAL = "run:\n  max_steps: 10\n"


def load(
    tmp_path: Path, recipe: str | bytes = MINIMAL, ds: dict[str, Any] | str | None = None, **options: Any
) -> LoadedSettings:
    """Load a recipe with this text; `ds` is the content of the DeepSpeed JSON. Files are named r.yaml and d.json."""
    path = tmp_path / "r.yaml"
    path.write_bytes(recipe if isinstance(recipe, bytes) else recipe.encode())
    if ds is not None:
        file = tmp_path / "d.json"
        file.write_text(ds if isinstance(ds, str) else json.dumps(ds, indent=1), encoding="utf-8")
        options["ds"] = file
    return load_settings(path, **options)


def message(tmp_path: Path, *arguments: Any, **options: Any) -> str:
    """The message of the SettingsError that loading raises, without the folder."""
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, *arguments, **options)
    return str(caught.value).replace(f"{tmp_path}/", "")
