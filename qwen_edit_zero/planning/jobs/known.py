"""Configurations of models: of a folder that is there, or of a released one by its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen_edit_zero.assets import asset_path
from qwen_edit_zero.errors import ModelFolderError

# transformer/config.json of the released models.
_RELEASED: dict[str, Any] = {
    "_class_name": "QwenImageTransformer2DModel",
    "attention_head_dim": 128,
    "axes_dims_rope": [16, 56, 56],
    "guidance_embeds": False,
    "in_channels": 64,
    "joint_attention_dim": 3584,
    "num_attention_heads": 24,
    "num_layers": 60,
    "out_channels": 16,
    "patch_size": 2,
}
RELEASED: dict[str, Mapping[str, Any]] = {
    "Qwen-Image": _RELEASED,
    "Qwen-Image-Edit": _RELEASED,
    "Qwen-Image-Edit-2509": _RELEASED,
    "Qwen-Image-Edit-2511": _RELEASED | {"zero_cond_t": True},
}
_FIRST_PIPELINE = "QwenImageEditPipeline"
TINY = "tiny"


def known_config(name_or_path: str | Path) -> Mapping[str, Any]:
    """The transformer's configuration of a model folder, of `tiny`, or of a released model by its name.

    Names are taken with or without an owner ("Qwen/Qwen-Image-Edit-2509"), in any case; a folder wins over a name.
    Raises ModelFolderError if there is neither, with the names there are, or if the folder's file is damaged.
    """
    folder = model_folder(name_or_path)
    if folder is None:
        return RELEASED[_released_name(name_or_path)]
    return read_config(folder / "transformer" / "config.json")


def takes_several_references(name_or_path: str | Path) -> bool:
    """Whether the model shows its text encoder small pictures, several of them (2509, 2511).

    The first Qwen-Image-Edit takes one and shows it at `data.vae_area`. Raises ModelFolderError as `known_config`.
    """
    folder = model_folder(name_or_path)
    if folder is None:
        return _released_name(name_or_path) not in ("Qwen-Image", "Qwen-Image-Edit")
    index = folder / "model_index.json"
    return not index.exists() or read_config(index).get("_class_name") != _FIRST_PIPELINE


def model_folder(name_or_path: str | Path) -> Path | None:
    """The folder with the model's configurations; None if there is none of that name."""
    if str(name_or_path) == TINY:
        return asset_path(TINY)
    folder = Path(name_or_path).expanduser()
    return folder if (folder / "transformer" / "config.json").is_file() else None


def _released_name(name_or_path: str | Path) -> str:
    said = Path(name_or_path).name.lower()
    for name in RELEASED:
        if said == name.lower():
            return name
    raise ModelFolderError(
        f"model.path: {name_or_path} is no folder with a transformer/config.json, and no model whose configuration is "
        f"known. To plan without a folder, set model.path to one of: {', '.join([*RELEASED, TINY])}"
    )


def read_config(path: Path) -> dict[str, Any]:
    """A JSON object. Raises ModelFolderError if the file is damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{path} is not readable as JSON ({error}); download it again") from error
    if not isinstance(value, dict):
        raise ModelFolderError(f"{path} holds no JSON object; download it again")
    return value
