"""Finding the files of a DeepSpeed checkpoint and making sure that they are all of the files of one save.

FOLDER/latest                                         the name of the newest tag
FOLDER/global_step10/                                 a tag; Lightning and accelerate choose other names
    mp_rank_00_model_states.pt                        ZeRO-1, 2: half-precision weights, frozen ones, buffers, shapes
    zero_pp_rank_0_mp_rank_00_model_states.pt, ...    ZeRO-3: the same for each rank, weights left out
    zero_pp_rank_0_mp_rank_00_optim_states.pt, ...    fp32 weights and moments of each rank; bf16_ or fp16_ in front
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_edit_zero.checkpoints.foreign.pickles import Record
from qwen_edit_zero.checkpoints.foreign.torch_files import TorchFile, read_torch_file
from qwen_edit_zero.errors import CheckpointError

LATEST = "latest"
_OPTIM = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OTHER_PARALLELISM = re.compile(r"(expert_|layer_\d+_expert_|layer_\d+-model_).*\.pt")


def holds_shards(folder: Path) -> bool:
    """Whether a folder holds files that DeepSpeed names so."""
    return folder.is_dir() and any(folder.glob("*_states.pt"))


def looks_like_deepspeed(path: Path) -> bool:
    """Whether a path is a tag's folder, or a folder of tags."""
    if not path.is_dir():
        return False
    return (path / LATEST).is_file() or holds_shards(path) or any(holds_shards(p) for p in path.iterdir())


def find_tag(path: Path) -> Path:
    """The tag's folder meant by a path: itself, the one that `latest` names, or the only one there is.

    Raises CheckpointError if `latest` is empty or names nothing, or if there are several tags and no `latest`.
    """
    if holds_shards(path):
        return path
    tags = sorted_tags(path)
    there = f"there are: {', '.join(p.name for p in tags)}" if tags else "there is no other tag"
    latest = path / LATEST
    if latest.is_file():
        tag = _read_latest(latest)
        if not tag:
            raise CheckpointError(f"{latest} is empty and should name a tag; give the folder of one ({there})")
        if "/" in tag or tag in (".", "..") or not holds_shards(path / tag):
            raise CheckpointError(
                f"{latest} names the tag {tag!r}, but {path / tag} holds no checkpoint: it was deleted or never "
                f"finished. Give the folder of a tag instead ({there})"
            )
        return path / tag
    if len(tags) == 1:
        return tags[0]
    raise CheckpointError(f"{path} has no file {LATEST}, and {there}. Give the folder of one tag")


def _read_latest(latest: Path) -> str:
    try:
        return latest.read_bytes()[:4096].decode("utf-8", errors="replace").lstrip("\ufeff").strip()
    except OSError as error:
        raise CheckpointError(f"cannot read {latest}: {error.strerror}") from None


def sorted_tags(path: Path) -> list[Path]:
    """The folders of a folder that hold shards, oldest first."""
    return sorted((p for p in path.iterdir() if holds_shards(p)), key=_age)


def _age(tag: Path) -> tuple[int, str]:
    """Sorts tags by their last number: global_step9 before global_step10."""
    numbers = re.findall(r"\d+", tag.name)
    return (int(numbers[-1]) if numbers else -1, tag.name)


def other_tags(tag: Path) -> list[str]:
    """Names of the tags beside this one, oldest first."""
    try:
        return [p.name for p in sorted_tags(tag.parent) if p != tag]
    except OSError:
        return []


@dataclass(frozen=True)
class DeepSpeedFiles:
    """The files of one save, described. `models` has one entry for ZeRO-1 and 2, one a rank for ZeRO-3."""

    tag: Path
    stage: int
    version: str
    models: tuple[TorchFile, ...]
    optims: tuple[TorchFile, ...]

    @property
    def world_size(self) -> int:
        """Ranks that wrote it."""
        return len(self.optims)

    @property
    def model(self) -> Mapping[str, Any]:
        """What rank 0 saved about the model."""
        value: Mapping[str, Any] = self.models[0].value
        return value

    def optimizer(self, rank: int) -> Mapping[str, Any]:
        """What a rank saved of the optimizer."""
        value: Mapping[str, Any] = self.optims[rank].value["optimizer_state_dict"]
        return value


def open_files(tag: Path) -> DeepSpeedFiles:
    """Describe all files of a tag, after checking that each rank's is there, none is too many, and they agree.

    Raises CheckpointError naming rank and file.
    """
    optims, models = _sort_out(tag)
    if not models:
        raise CheckpointError(f"{tag} misses mp_rank_00_model_states.pt (or, of ZeRO-3, zero_pp_rank_0_...)")
    if not optims:
        raise CheckpointError(
            f"{tag} has no *_optim_states.pt, where ZeRO keeps the fp32 weights: this is no ZeRO checkpoint, or they "
            "were left on the disks of the nodes"
        )
    model = _described(models[min(models)], ("module", "param_shapes", "buffer_names"))
    world = model.value.get("dp_world_size")
    first = _described(optims[min(optims)], ("optimizer_state_dict",))
    counts = _partition_counts(first)
    if not isinstance(world, int):
        world = counts[0]
    _check_ranks(tag, optims, world, "optim_states")
    described = [
        first if rank == min(optims) else _described(optims[rank], ("optimizer_state_dict",)) for rank in range(world)
    ]
    stage = _stage(first)
    for rank, file in enumerate(described):
        if set(_partition_counts(file)) != {world}:
            raise CheckpointError(
                f"{file.path} (rank {rank}) was saved by {_partition_counts(file)} ranks, but {model.path.name} by "
                f"{world}: the files are of different saves, or hold experts, which are not read here"
            )
        if _stage(file) != stage:
            raise CheckpointError(f"{file.path} is of ZeRO-{_stage(file)}, but {first.path.name} of ZeRO-{stage}")
    if stage == 3:
        _check_ranks(tag, models, world, "model_states")
        states = [
            model if rank == min(models) else _described(models[rank], ("param_shapes",)) for rank in range(world)
        ]
    elif len(models) != 1:
        raise CheckpointError(f"{models[max(models)]} does not belong to a checkpoint of ZeRO-{stage}")
    else:
        states = [model]
    files = DeepSpeedFiles(tag, stage, _version(model, first), tuple(states), tuple(described))
    _check_same_save(files)
    return files


def _sort_out(tag: Path) -> tuple[dict[int, Path], dict[int, Path]]:
    optims: dict[int, Path] = {}
    models: dict[int, Path] = {}
    for path in sorted(tag.glob("*.pt")):
        optim, model = _OPTIM.fullmatch(path.name), _MODEL.fullmatch(path.name)
        found = optim or model
        if found is None:
            if _OTHER_PARALLELISM.fullmatch(path.name):
                raise CheckpointError(
                    f"{path} belongs to a model of experts or pipeline stages, which is not read here"
                )
            if "_states" in path.name:
                raise CheckpointError(f"{path} does not belong to this checkpoint; move it away")
            continue
        if int(found[2]):
            raise CheckpointError(f"{path} is of a tensor-parallel model (model rank {int(found[2])}), not read here")
        rank = int(found[1] or 0)
        known = optims if optim else models
        if rank in known:
            raise CheckpointError(f"{path} and {known[rank].name} are both of rank {rank}; one does not belong here")
        known[rank] = path
    return optims, models


def _described(path: Path, keys: Iterable[str]) -> TorchFile:
    file = read_torch_file(path)
    missing = [key for key in keys if not isinstance(file.value, Mapping) or key not in file.value]
    if missing:
        raise CheckpointError(f"{path} is no file of a ZeRO checkpoint: it has no {missing[0]}")
    return file


def _partition_counts(file: TorchFile) -> list[int]:
    count = file.value["optimizer_state_dict"].get("partition_count")
    counts = list(count) if isinstance(count, list | tuple) else [count]
    if not counts or not all(isinstance(c, int) and c > 0 for c in counts):
        raise CheckpointError(f"{file.path} does not say how many ranks saved it (partition_count)")
    return counts


def _stage(file: TorchFile) -> int:
    stage = file.value["optimizer_state_dict"].get("zero_stage")
    if isinstance(stage, Record) and stage.arguments:  # an enum of DeepSpeed
        stage = stage.arguments[0]
    if stage not in (1, 2, 3):
        raise CheckpointError(f"{file.path} is of ZeRO stage {stage}, which is not known here")
    return int(stage)


def _version(*files: TorchFile) -> str:
    return next((str(f.value["ds_version"]) for f in files if f.value.get("ds_version")), "of unknown version")


def _check_ranks(tag: Path, found: Mapping[int, Path], world: int, what: str) -> None:
    missing = sorted(set(range(world)) - set(found))
    extra = sorted(set(found) - set(range(world)))
    others = other_tags(tag)
    hint = f". Beside it there {'is' if len(others) == 1 else 'are'} {', '.join(others)}" if others else ""
    if missing:
        ranks = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
        raise CheckpointError(
            f"{tag} misses the {what}.pt of rank {ranks}: it was saved by {world} ranks, and their files are "
            f"{len(found)}. They may be on other nodes' disks{hint}"
        )
    if extra:
        raise CheckpointError(
            f"{found[extra[0]]} (rank {extra[0]}) does not belong to a checkpoint of {world} ranks; it was left by "
            "another run. Move it away"
        )


def _check_same_save(files: DeepSpeedFiles) -> None:
    for key in ("global_steps", "param_shapes", "dp_world_size"):
        for rank, file in enumerate(files.models):
            if file.value.get(key) != files.model.get(key):
                raise CheckpointError(
                    f"{file.path} (rank {rank}) is not of the same save as {files.models[0].path.name}: {key} differs"
                )
    versions = {str(f.value.get("ds_version")) for f in files.optims}
    if len(versions) > 1:
        raise CheckpointError(
            f"{files.tag}: its files are of different saves, by DeepSpeed {' and '.join(sorted(versions))}"
        )
