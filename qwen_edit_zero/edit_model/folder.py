"""A model folder in diffusers layout: is it whole, of this family, and which variant? Imports no torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any

from qwen_edit_zero.edit_model.fingerprint import fingerprint_files
from qwen_edit_zero.edit_model.shards import Shards, open_shards
from qwen_edit_zero.errors import ModelFolderError
from qwen_edit_zero.planning.jobs.known import read_config

TINY = "tiny"
_CONFIG_SUFFIXES = {".json", ".txt", ".jinja", ".model"}
_PIPELINES = {"QwenImageEditPipeline": False, "QwenImageEditPlusPipeline": True}  # name: takes several references
_CLASSES = {
    "transformer": "QwenImageTransformer2DModel",
    "vae": "AutoencoderKLQwenImage",
    "text_encoder": "Qwen2_5_VLForConditionalGeneration",
    "scheduler": "FlowMatchEulerDiscreteScheduler",
}
_CONFIGS = {
    "transformer": "config.json",
    "vae": "config.json",
    "text_encoder": "config.json",
    "scheduler": "scheduler_config.json",
}
_WEIGHTS = {"transformer": "diffusion_pytorch_model", "vae": "diffusion_pytorch_model", "text_encoder": "model"}
COMPONENTS = ("transformer", "vae", "text_encoder", "tokenizer", "processor", "scheduler")


class Variant(StrEnum):
    """The models of the family, which differ in how references are presented; see `docs/model.md`."""

    EDIT = "Qwen-Image-Edit"
    EDIT_2509 = "Qwen-Image-Edit-2509"
    EDIT_2511 = "Qwen-Image-Edit-2511"

    @property
    def takes_several_references(self) -> bool:
        """Whether a sample may have more than one reference picture."""
        return self is not Variant.EDIT


@dataclass(frozen=True)
class ModelFolder:
    """A folder that passed `open_model_folder`'s checks.

    Attributes:
        path: absolute path of the folder.
        variant: which model it holds.
        transformer_config, vae_config, scheduler_config: the components' JSON configurations.
        shards: the safetensors shards of `transformer` (see `has_weights`), `vae` and `text_encoder`.
    """

    path: Path
    variant: Variant
    transformer_config: dict[str, Any]
    vae_config: dict[str, Any]
    scheduler_config: dict[str, Any]
    shards: dict[str, Shards]

    @property
    def has_weights(self) -> bool:
        """Whether the transformer's weights are there, and not its configuration alone."""
        return "transformer" in self.shards

    def no_weights(self) -> ModelFolderError:
        """What to raise where they are needed."""
        return _incomplete(self.path, [f"transformer/{_WEIGHTS['transformer']}*.safetensors"])

    @cached_property
    def fingerprint(self) -> str:
        """Hex digest of all files that have a say in the model's output; the same for a copy elsewhere."""
        assert self.has_weights
        return self.fingerprint_of(*COMPONENTS)

    def fingerprint_of(self, *components: str) -> str:
        """Hex digest of the configuration, tokenizer and weight files of these components."""
        files: list[Path] = []
        for component in components:
            folder = self.path / component
            files += [p for p in folder.iterdir() if p.suffix in _CONFIG_SUFFIXES and not p.name.startswith(".")]
            files += self.shards[component].files if component in self.shards else ()
        return fingerprint_files(self.path, files)


def open_model_folder(path: str | Path, *, without_weights: bool = False) -> ModelFolder:
    """Check a folder of Qwen-Image-Edit, -2509 or -2511, or the built-in model called `tiny`; reads no weights.

    Takes milliseconds. `without_weights` allows a folder whose transformer has no weight file, only its configuration.
    Raises ModelFolderError saying which file is missing or damaged, or which other model it is.
    """
    if str(path) == TINY:
        path = _built_in()
    folder = Path(path).expanduser().absolute()
    pipeline = _pipeline_class(folder)
    _check_files(folder, without_weights=without_weights)
    configs = {component: read_config(folder / component / name) for component, name in _CONFIGS.items()}
    for component in ("transformer", "vae", "text_encoder"):
        _check_class(folder, component, configs[component])
    variant = _variant(folder, pipeline, configs["transformer"])
    return ModelFolder(
        path=folder,
        variant=variant,
        transformer_config=configs["transformer"],
        vae_config=configs["vae"],
        scheduler_config=configs["scheduler"],
        shards={
            component: open_shards(folder / component, base)
            for component, base in _WEIGHTS.items()
            if component != "transformer" or not without_weights or _weight_files(folder, component)
        },
    )


def _built_in() -> Path:
    from qwen_edit_zero.edit_model.tiny import materialise_tiny_model

    try:
        return materialise_tiny_model()
    except OSError as error:
        raise ModelFolderError(
            f"model.path=tiny: the built-in model cannot be unpacked ({error}). Set the environment variable "
            "QWEN_EDIT_ZERO_CACHE to a folder that can be written, or install the package again"
        ) from error


def _pipeline_class(folder: Path) -> str:
    if not folder.is_dir():
        raise ModelFolderError(_no_folder(folder))
    index = folder / "model_index.json"
    if not index.exists():
        raise ModelFolderError(_no_index(folder))
    name = read_config(index).get("_class_name")
    if name not in _PIPELINES:
        raise ModelFolderError(
            f"{folder} holds a model of another family: model_index.json says {name}. This program trains "
            f"{', '.join(Variant)}, whose folders say {' or '.join(_PIPELINES)}; set model.path to one of those"
        )
    return str(name)


def _weight_files(folder: Path, component: str) -> list[Path]:
    return list((folder / component).glob(f"{_WEIGHTS[component]}*"))


def _check_files(folder: Path, *, without_weights: bool) -> None:
    """All missing files are listed at once, so that one download mends them."""
    configs = [f"{component}/{name}" for component, name in _CONFIGS.items()]
    missing = [name for name in configs if not (folder / name).exists()]
    for component in ("tokenizer", "processor"):
        there = set(os.listdir(folder / component)) if (folder / component).is_dir() else set()
        if "tokenizer.json" not in there and not {"vocab.json", "merges.txt"} <= there:
            missing.append(f"{component}/tokenizer.json (or vocab.json with merges.txt)")
        if component == "processor" and not there & {"preprocessor_config.json", "processor_config.json"}:
            missing.append("processor/preprocessor_config.json")
    for component, base in _WEIGHTS.items():
        if not _weight_files(folder, component) and not (without_weights and component == "transformer"):
            missing.append(f"{component}/{base}*.safetensors")
    if missing:
        raise _incomplete(folder, missing)


def _incomplete(folder: Path, missing: list[str]) -> ModelFolderError:
    return ModelFolderError(
        f"{folder} is incomplete; not there: {', '.join(missing)}. Download the whole model again, with all of its "
        f"folders ({', '.join(COMPONENTS)})"
    )


def _check_class(folder: Path, component: str, config: dict[str, Any]) -> None:
    found = config.get("_class_name") or next(iter(config.get("architectures") or ()), None)
    if found != _CLASSES[component]:
        raise ModelFolderError(
            f"{folder / component / _CONFIGS[component]} describes a {found}, not the {_CLASSES[component]} of this "
            "model family. The folder was put together from different models, or model.path names the wrong one"
        )


def _variant(folder: Path, pipeline: str, transformer: dict[str, Any]) -> Variant:
    for key in ("guidance_embeds", "use_additional_t_cond", "use_layer3d_rope"):
        if transformer.get(key):
            raise ModelFolderError(
                f"{folder / 'transformer' / 'config.json'} sets {key}, which no Qwen-Image-Edit model does: this is a "
                "relative (a guidance-distilled or layered model) that this program cannot train"
            )
    if not _PIPELINES[pipeline]:
        return Variant.EDIT
    return Variant.EDIT_2511 if transformer.get("zero_cond_t") else Variant.EDIT_2509


def _no_folder(folder: Path) -> str:
    if folder.is_file():
        return (
            f"{folder} is a file; model.path must be a folder in diffusers layout (model_index.json, transformer/, "
            "vae/ ...). Single-file checkpoints cannot be trained: they lack the text encoder and the configurations"
        )
    said = os.path.relpath(folder)
    hint = "Set model.path to a folder of Qwen-Image-Edit-2509 in diffusers layout, or to tiny for the built-in model"
    if said.count("/") == 1 and not said.startswith("."):
        hint += f". If {said} is a Hugging Face model id: nothing is downloaded here; first run `hf download {said} "
        hint += "--local-dir DIR`"
    return f"model.path: there is no folder {folder}. {hint}"


def _no_index(folder: Path) -> str:
    message = f"{folder} has no model_index.json, so it is no model folder in diffusers layout"
    if (folder / "config.json").exists():
        return f"{message}; it looks like one component ({folder.name}/). Set model.path to the folder above it"
    snapshots = sorted((folder / "snapshots").glob("*/model_index.json"))
    if snapshots:
        return f"{message}; it is a download cache. Set model.path to {snapshots[-1].parent}"
    inner = sorted(folder.glob("*/model_index.json"))
    if inner:
        return f"{message}; did you mean {inner[0].parent}?"
    return f"{message}. Expected model_index.json and the folders {', '.join(COMPONENTS)}; download the whole model"
