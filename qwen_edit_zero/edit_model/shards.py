"""The safetensors shards of one component of a model folder, checked against their index. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from qwen_edit_zero.errors import ModelFolderError
from qwen_edit_zero.safetensors_file import StoredTensor, read_header


@dataclass(frozen=True)
class Shards:
    """All tensors of a component, wherever they lie.

    Attributes:
        files: the shards, sorted by name.
        tensors: by name as stored.
    """

    files: tuple[Path, ...]
    tensors: Mapping[str, StoredTensor]


def open_shards(folder: Path, base: str) -> Shards:
    """Find `base.safetensors.index.json` or `base.safetensors` in `folder` and check every shard.

    `base` is `diffusion_pytorch_model` for diffusers components and `model` for transformers ones. Reads headers only.
    Raises ModelFolderError naming the file if a shard is missing, damaged, or does not hold what the index says.
    """
    index, single = folder / f"{base}.safetensors.index.json", folder / f"{base}.safetensors"
    if not index.exists():
        if not single.exists():
            raise ModelFolderError(_nothing_there(folder, base))
        tensors = read_header(single)
        _refuse_empty(tensors)
        return Shards((single,), tensors)
    weight_map = _read_index(index)
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise ModelFolderError(
            f"{folder} is incomplete: {index.name} names {len(names)} shards, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not there. Download the missing files; training would otherwise "
            "start from random values"
        )
    headers = {name: read_header(folder / name) for name in names}
    tensors = {}
    for tensor, shard in weight_map.items():
        if tensor not in headers[shard]:
            raise ModelFolderError(
                f"{index} says that {tensor} is in {shard}, but it is not there: index and shards are of different "
                "models or versions. Download them again together"
            )
        tensors[tensor] = headers[shard][tensor]
    _refuse_empty(tensors)
    return Shards(tuple(folder / name for name in names), tensors)


def _read_index(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        if not (weight_map and all(isinstance(v, str) for v in weight_map.values())):
            raise ValueError("weight_map is empty or malformed")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelFolderError(f"{index} is no safetensors index ({error}); download it again") from error
    for name in sorted(set(weight_map.values())):
        # Only the name is judged: download caches keep the shards themselves behind symbolic links.
        if PurePosixPath(name).name != name or "\\" in name or name in ("", ".", ".."):
            raise ModelFolderError(
                f"{index} names the shard {name!r}, which leads out of its folder. Shards must lie beside their index; "
                "this index is damaged or not to be trusted"
            )
    return dict(weight_map)


def _refuse_empty(tensors: Mapping[str, StoredTensor]) -> None:
    for name, tensor in tensors.items():
        if tensor.nbytes == 0:
            raise ModelFolderError(
                f"{tensor.path}: {name} has no elements (shape {list(tensor.shape)}). This happens when weights are "
                "saved while ZeRO-3 has them partitioned; make the folder again with full weights"
            )


def _nothing_there(folder: Path, base: str) -> str:
    others = sorted(p.name for p in folder.glob(f"{base}*")) or sorted(p.name for p in folder.glob("pytorch_model*"))
    found = f"; found instead: {', '.join(others[:4])}" if others else ""
    pickled = any(name.endswith(".bin") for name in others)
    advice = "Convert them to safetensors: pickles are never read here" if pickled else "Download the model again"
    return f"{folder} has neither {base}.safetensors nor {base}.safetensors.index.json{found}. {advice}"
