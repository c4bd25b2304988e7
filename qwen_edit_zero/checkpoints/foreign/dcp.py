"""torch distributed checkpoints (DCP) of FSDP training, as accelerate, Lightning and torchtitan write them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qwen_edit_zero.checkpoints.foreign.dcp_metadata import METADATA, DcpMetadata, Entry, read_metadata
from qwen_edit_zero.checkpoints.foreign.prefixes import clean
from qwen_edit_zero.checkpoints.foreign.source import ForeignGroup, ForeignSource, ForeignState, ForeignTensor
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.flat_state import PARAM
from qwen_edit_zero.safetensors_file import element_count

# optim.state.NAME.exp_avg; torchtitan calls it optimizer, Lightning optimizer_0; the name may be a number
_MOMENT = re.compile(r"(?:optim\w*\.)?state\.(.+)\.(step|exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer)")
_GROUP = re.compile(r"(?:optim\w*\.)?param_groups\.(.+)\.([^.]+)")
_MEMBERS = re.compile(r"(?:optim\w*\.)?param_groups\.\d+\.(params|param_names)")
_GROUPS = re.compile(r"(?:optim\w*\.)?param_groups")
_OPTIMIZER = re.compile(r"(optim\w*)\.|state\.|param_groups")
_OTHER = re.compile(r"(train_state|trainer_state|dataloader|lr_scheduler|scheduler|rng|rng_state|random_state)\w*\.")
_GLOBAL_STEP = re.compile(r"(?:\w+\.)*(?:train_state\.step|trainer_state\.step|global_step|step)")
_OPTIONS = ("weight_decay", "lr")
STEP = "step"


def looks_like_dcp(path: Path) -> bool:
    """Whether a path is a DCP folder, or one that holds model and optimizer in such folders, as accelerate does it."""
    return path.is_dir() and bool(_folders(path))


def _folders(path: Path) -> list[Path]:
    if (path / METADATA).is_file():
        return [path]
    return sorted(p for p in path.iterdir() if (p / METADATA).is_file())


def open_dcp(path: Path) -> ForeignState:
    """Describe a DCP folder, or a folder that holds model and optimizer in one each.

    Raises CheckpointError naming file and tensor if a file is missing or cut short, if the parts of a tensor do not
    cover every element exactly once, or if optimizer state cannot be matched with parameters.
    """
    folders = _folders(path)
    saved = [read_metadata(folder) for folder in folders]
    files = tuple(file for metadata in saved for file in metadata.files)
    state = ForeignState(
        path=path,
        format="torch distributed checkpoint",
        world_size=max((_rank(f) for f in files), default=0) + 1,
        files=(*(folder / METADATA for folder in folders), *files),
    )
    entries: dict[str, Entry] = {}
    for metadata in saved:
        for key, entry in metadata.tensors.items():
            if key in entries:
                raise CheckpointError(f"{key} is in several folders of {path}; give one that is a single checkpoint")
            entries[key] = entry
    _add_parameters(state, saved, entries)
    moments = {key: found for key in entries if (found := _MOMENT.fullmatch(key))}
    groups = _groups(saved)
    names = _moment_names(state, {m[1] for m in moments.values()}, groups)
    steps: dict[str, Entry] = {}
    for key, found in moments.items():
        name, kind = names[found[1]], found[2]
        if kind == STEP:
            steps[name] = entries[key]
        else:
            _add(state, entries[key], name, kind)
    _check_moments(state)
    state.groups = _options(saved, names)
    state.optimizer_steps = _steps(state, steps)
    state.step = _global_step(saved, entries)
    if state.step is None:
        state.step = state.optimizer_steps
    _note_strays(state, folders, files)
    return state


def _rank(path: Path) -> int:
    found = re.fullmatch(r"__(\d+)_\d+\.distcp", path.name)
    return int(found[1]) if found else 0


def _add_parameters(state: ForeignState, saved: Sequence[DcpMetadata], entries: Mapping[str, Entry]) -> None:
    """Everything that is neither of the optimizer nor of the trainer, in the order of the state dict if it is known."""
    order = {key: number for number, key in enumerate(key for metadata in saved for key in metadata.paths)}
    for key in sorted(entries, key=lambda k: order.get(k, len(order))):
        if not (_OPTIMIZER.match(key) or _OTHER.match(key)):
            _add(state, entries[key], key, PARAM)


def _add(state: ForeignState, entry: Entry, name: str, kind: str) -> None:
    if (kind, name) in state.tensors:
        raise CheckpointError(f"{state.path}: {entry.key} is a second {name} ({kind})")
    if kind == PARAM or element_count(entry.shape) or not entry.shape:
        state.add(ForeignTensor(name, kind, entry.dtype, entry.shape, entry.shape, entry.blocks))


def _groups(saved: Sequence[DcpMetadata]) -> list[str | int]:
    """What the optimizer's groups list: names, or numbers, in order; empty if they cannot be known."""
    for wanted in ("param_names", "params"):
        listed: list[str | int] = []
        for metadata in saved:
            for key, stretch in metadata.objects.items():
                if _GROUPS.fullmatch(key) and isinstance(groups := stretch.open().value, list):
                    listed += [name for group in groups for name in group.get(wanted, ())]
                elif (found := _MEMBERS.fullmatch(key)) and found[1] == wanted:
                    listed += stretch.open().value
        if listed:
            return listed
    keys = (key for metadata in saved for key in (*metadata.paths, *metadata.tensors, *metadata.objects))
    return list(dict.fromkeys(found[1] for key in keys if (found := _GROUP.fullmatch(key)) and not found[1].isdigit()))


def _options(saved: Sequence[DcpMetadata], names: Mapping[str, str]) -> tuple[ForeignGroup, ...]:
    """Weight decay and learning rate of the optimizer's groups; nothing unless they are told of all.

    `names` leads from what the groups list to parameters. Groups are stored as one list, or each option by itself, of
    groups by number or of every parameter by name.
    """
    stored: dict[str, dict[str, Any]] = {}
    for metadata in saved:
        for key, stretch in metadata.objects.items():
            if _GROUPS.fullmatch(key) and isinstance(value := stretch.open().value, list):
                stored |= {str(number): dict(group) for number, group in enumerate(value)}
            elif (found := _GROUP.fullmatch(key)) and found[2] in (*_OPTIONS, "params", "param_names"):
                stored.setdefault(found[1], {})[found[2]] = stretch.open().value
    members: dict[tuple[float, float], list[str]] = {}
    for label, group in stored.items():
        listed = group.get("param_names") or group.get("params")
        decay, lr = (group.get(option) for option in _OPTIONS)
        if not (isinstance(decay, int | float) and isinstance(lr, int | float)):
            return ()
        known = [names[str(member)] for member in ([label] if listed is None else listed) if str(member) in names]
        members.setdefault((float(decay), float(lr)), []).extend(known)
    return tuple(ForeignGroup(decay, lr, tuple(known)) for (decay, lr), known in members.items() if known)


def _moment_names(state: ForeignState, labels: set[str], groups: Sequence[str | int]) -> dict[str, str]:
    """The parameter that each label in the optimizer's state means; marks what the groups list as trained."""
    parameters = [name for kind, name in state.tensors if kind == PARAM]
    cleaned = {clean(name): name for name in parameters}
    if labels and all(label.isdigit() for label in labels) and not any(isinstance(g, str) for g in groups):
        total = max(len(groups), 1 + max(int(label) for label in labels))
        if len(parameters) != total:
            raise CheckpointError(
                f"{state.path}: its optimizer numbers {total} parameters without naming them, and there are "
                f"{len(parameters)} weights: which is which cannot be known (some are frozen, or buffers)"
            )
        for name in parameters:
            state.mark_trained(name)
        return {str(number): parameters[number] for number in range(total)}
    names: dict[str, str] = {}
    ends = _by_end(cleaned)
    for label in (*labels, *(str(g) for g in groups)):
        meant = cleaned.get(clean(label)) or ends.get(clean(label))
        if meant is not None:
            names[label] = meant
        elif label in labels:
            raise CheckpointError(f"{state.path} holds optimizer state of {label}, but no such parameter")
    for name in names.values():
        state.mark_trained(name)
    return names


def _by_end(cleaned: Mapping[str, str]) -> dict[str, str]:
    """Parameters by what follows the key of the model in the state dict (`model.`), where all have the same."""
    heads = {name.split(".")[0] for name in cleaned}
    if len(heads) != 1:
        return {}
    return {name.partition(".")[2]: stored for name, stored in cleaned.items() if "." in name}


def _check_moments(state: ForeignState) -> None:
    for (kind, name), tensor in state.tensors.items():
        if kind != PARAM and tensor.shape != state.tensors[PARAM, name].shape:
            raise CheckpointError(
                f"{state.path}: {kind} of {name} has shape {list(tensor.shape)}, but the parameter "
                f"{list(state.tensors[PARAM, name].shape)}"
            )


def _steps(state: ForeignState, entries: Mapping[str, Entry]) -> int | None:
    """The optimizer's count, after noting each parameter's own."""
    if not entries:
        return None
    state.parameter_steps = {name: _number(entry) for name, entry in entries.items()}
    found: dict[int, str] = {}
    for name, steps in state.parameter_steps.items():
        found.setdefault(steps, name)
    if len(found) > 1:
        told = ", ".join(f"{steps} for {name}" for steps, name in sorted(found.items())[:4])
        state.notes.append(
            f"its optimizer counts different steps ({told}): parameters with fewer had no gradient in some steps. Each "
            "goes on from its own count, and the learning rate from the largest"
        )
    return max(found)


def _number(entry: Entry) -> int:
    state = ForeignState(path=Path(), format="", world_size=1)
    state.add(ForeignTensor(STEP, STEP, entry.dtype, entry.shape, entry.shape, entry.blocks))
    types: dict[str, Any] = {"F32": np.float32, "I64": np.int64, "F64": np.float64, "I32": np.int32}
    if element_count(entry.shape) != 1 or entry.dtype not in types:
        raise CheckpointError(f"{entry.key} is {entry.dtype} {list(entry.shape)}, which is no step count")
    with ForeignSource(state) as source:
        value = source.read_bytes(STEP, 0, 1, STEP).view(types[entry.dtype])[0]
        source.finish()
    return int(value)


def _global_step(saved: Iterable[DcpMetadata], entries: Mapping[str, Entry]) -> int | None:
    for key, entry in entries.items():
        if _GLOBAL_STEP.fullmatch(key) and not _MOMENT.fullmatch(key) and element_count(entry.shape) == 1:
            return _number(entry)
    for metadata in saved:
        for key, stretch in metadata.objects.items():
            if _GLOBAL_STEP.fullmatch(key) and isinstance(value := stretch.open().value, int):
                return value
    return None


def _note_strays(state: ForeignState, folders: Iterable[Path], files: Sequence[Path]) -> None:
    strays = sorted(p.name for folder in folders for p in folder.glob("*.distcp") if p not in files)
    if strays:
        state.notes.append(f"{', '.join(strays[:5])}: of another save, named nowhere, and not read")
