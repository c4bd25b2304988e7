"""Names inside a `checkpoints` folder, and how a path given by a user leads to one checkpoint.

    RUN/checkpoints/
      step-00000200/                 a checkpoint, if its manifest says so
      .step-00000400.1a2b3c4d.partial/   being written, or left by a run that died while writing
      .step-00000200.replaced/       the old one of that step, while a new one takes its place
      .step-00000100.deleted/        being deleted

Only `step-*` folders are ever read as checkpoints, with one exception: a `.replaced` folder counts as its step as long
as that step's own folder is absent, which is so if the run died between the two renames of a replacement.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from qwen_edit_zero.errors import CheckpointError

MANIFEST = "manifest.json"
RUN_STATE = "run_state.json"
RANGES = "ranges.safetensors"
CHECKPOINTS = "checkpoints"  # the folder in a run's folder

_STEP = re.compile(r"step-(\d{8,})")
_HIDDEN = re.compile(r"\.step-(\d{8,})\.(?:[0-9a-f]{8}\.)?(partial|replaced|deleted)")
_OWN_FILE = re.compile(
    r"manifest\.json(\.tmp)?|run_state\.json|ranges\.safetensors|rank-\d{5,}\.(safetensors|ranges)|\.save-[0-9a-f]{32}"
)


def checkpoint_name(step: int) -> str:
    """`step-00000200`: fixed width, so that sorting by name is sorting by step."""
    assert step >= 0
    return f"step-{step:08d}"


def rank_file(rank: int) -> str:
    """Name of the file that holds the ranges of a rank."""
    return f"rank-{rank:05d}.safetensors"


def sidecar_file(rank: int) -> str:
    """Name of the file in which a rank tells rank 0 what it wrote; gone once the manifest is written."""
    return f"rank-{rank:05d}.ranges"


def partial_folder(folder: Path, step: int, save_id: str) -> Path:
    """Where a checkpoint grows until it is whole: no other save, of a run that thinks it lives, grows there too."""
    return folder / f".{checkpoint_name(step)}.{save_id[:8]}.partial"


def replaced_folder(folder: Path, step: int) -> Path:
    """Where an older checkpoint of the same step waits until the new one has its name."""
    return folder / f".{checkpoint_name(step)}.replaced"


def deleted_folder(folder: Path, step: int) -> Path:
    """Where a checkpoint goes, in one rename, before its files are deleted."""
    return folder / f".{checkpoint_name(step)}.deleted"


def step_of(path: Path) -> int | None:
    """The step in a checkpoint folder's name (also a `.replaced` one), or None if it is not such a name."""
    found = _STEP.fullmatch(path.name)
    if found is None:
        hidden = _HIDDEN.fullmatch(path.name)
        found = hidden if hidden and hidden[2] == "replaced" else None
    return int(found[1]) if found else None


def is_own_file(name: str) -> bool:
    """Whether a file of this name inside a checkpoint folder is one that this package writes."""
    return _OWN_FILE.fullmatch(name) is not None


@dataclass(frozen=True)
class Hidden:
    """A folder that is no checkpoint by its name: `state` is `partial`, `replaced` or `deleted`."""

    path: Path
    step: int
    state: str


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"cannot look into {folder}: {error.strerror}") from None


def hidden_folders(folder: Path) -> list[Hidden]:
    """Everything under way, or left by a run that died, in this `checkpoints` folder. Raises CheckpointError."""
    found = []
    for path in _entries(folder):
        match = _HIDDEN.fullmatch(path.name)
        if match and path.is_dir() and not path.is_symlink():
            found.append(Hidden(path, int(match[1]), match[2]))
    return found


def checkpoint_folders(folder: Path) -> list[Path]:
    """Folders named as checkpoints, oldest step first, whether they are valid or not; none if there is no such folder.

    Raises CheckpointError if it cannot be looked into, or is something else: a link to a disk that has gone, a file.
    """
    if not folder.is_dir():
        if folder.is_symlink():
            raise CheckpointError(
                f"{folder} is a link to {folder.readlink()}, which is no folder now: is its file system mounted?"
            )
        if folder.exists():
            raise CheckpointError(f"{folder} is a file, where checkpoints would be; move it away")
        return []
    steps = {int(m[1]): p for p in _entries(folder) if (m := _STEP.fullmatch(p.name)) and p.is_dir()}
    for hidden in hidden_folders(folder):
        if hidden.state == "replaced":
            steps.setdefault(hidden.step, hidden.path)
    return [steps[step] for step in sorted(steps)]


def looks_like(path: Path) -> str:
    """What kind of thing a folder without our manifest is, in words, for messages."""
    if not path.exists():
        return "it does not exist"
    if not path.is_dir():
        return "it is a file, not a folder"
    names = {p.name for p in _entries(path)}
    if ".metadata" in names:
        return (
            "it is a torch distributed checkpoint (DCP) folder; qwen-edit-zero checkpoint import brings it into a run"
        )
    if any(n.endswith("_optim_states.pt") for n in names) or any(n.startswith("global_step") for n in names):
        return "it is a checkpoint written by DeepSpeed itself; qwen-edit-zero checkpoint import brings it into a run"
    if "model_index.json" in names or "config.json" in names:
        return "it is a model folder, not a checkpoint"
    if not names:
        return "it is empty"
    return f"it has neither {MANIFEST}, nor {CHECKPOINTS}/, nor folders named step-00000000"


def holds_checkpoints(path: Path) -> Path | None:
    """The `checkpoints` folder meant by a RUN folder or a RUN/checkpoints folder; None if it is neither."""
    if (path / CHECKPOINTS).is_dir():
        return path / CHECKPOINTS
    return path if checkpoint_folders(path) else None


def refuse_source(path: Path) -> CheckpointError:
    """The error for a path that is neither a checkpoint, nor a run, nor a folder of checkpoints."""
    return CheckpointError(
        f"{path} is not a checkpoint: {looks_like(path)}. "
        f"Give a run folder, its {CHECKPOINTS} folder, or one {CHECKPOINTS}/step-... folder in it."
    )
