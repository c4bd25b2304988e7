"""A model folder of any size on disk, made from a configuration: random bf16 shards beside the tiny model's rest."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.engines.problem import SeededWeights, model_folder
from qwen_edit_zero.edit_model.folder import ModelFolder, open_model_folder
from qwen_edit_zero.edit_model.transformer import build_transformer

_SHARD_BYTES = 256 << 20


def make_folder(path: Path, config: dict[str, Any]) -> ModelFolder:
    """The folder at `path`, written if it is not there with this configuration. Holds one shard at a time."""
    marker = path / "transformer" / "config.json"
    if not marker.exists() or json.loads(marker.read_text(encoding="utf-8")) != config:
        shutil.rmtree(path, ignore_errors=True)
        tiny = open_model_folder("tiny").path
        shutil.copytree(tiny, path, ignore=lambda folder, names: names if Path(folder).name == "transformer" else [])
        _write_shards(path / "transformer", config)
        marker.write_text(json.dumps(config), encoding="utf-8")
    return open_model_folder(path)


def _write_shards(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(exist_ok=True)
    with torch.device("meta"):
        module = build_transformer(model_folder(config))
    weights = SeededWeights(module)
    shards: list[list[str]] = [[]]
    filled = 0
    for name, parameter in module.named_parameters():
        if filled + 2 * parameter.numel() > _SHARD_BYTES:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += 2 * parameter.numel()
    files = [f"diffusion_pytorch_model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    for file, names in zip(files, shards, strict=True):
        save_file({name: weights.whole(name).bfloat16() for name in names}, folder / file, {"format": "pt"})
    total = 2 * sum(parameter.numel() for parameter in module.parameters())
    where = {name: file for file, names in zip(files, shards, strict=True) for name in names}
    index = {"metadata": {"total_size": total}, "weight_map": where}
    (folder / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
