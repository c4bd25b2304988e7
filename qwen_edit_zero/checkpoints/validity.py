"""Is a checkpoint whole? The cheap answer (names, sizes, manifest) and the full one (every byte)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from qwen_edit_zero.checkpoints import layout
from qwen_edit_zero.checkpoints.disk import CHUNK_BYTES, checksum_of
from qwen_edit_zero.checkpoints.given_up import given_up
from qwen_edit_zero.checkpoints.manifest import ManifestHead, load_head, load_manifest
from qwen_edit_zero.checkpoints.ranges import StoredRange
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.safetensors_file import ITEM_SIZE

Progress = Callable[[int, int], None]  # bytes done, bytes in all
Look = Callable[[Path], None]


def check_checkpoint(path: Path) -> ManifestHead:
    """The manifest's head, if the checkpoint is whole as far as can be told without reading its data.

    That is: the manifest is undamaged and of a known version, the folder's name is its step, and each file is there,
    with its size, and belongs to the same save.
    Raises CheckpointError with the reason.
    """
    manifest = load_head(path)
    named = layout.step_of(path)
    if named is not None and named != manifest.step:
        raise CheckpointError(f"{path} is named as step {named}, but its manifest is of step {manifest.step}")
    for record in manifest.files:
        file = path / record.name
        try:
            size = file.stat().st_size
        except FileNotFoundError:
            raise CheckpointError(f"{path} misses {record.name}") from None
        except OSError as error:
            raise CheckpointError(f"cannot read {file}: {error.strerror}") from None
        if size != record.size:
            raise CheckpointError(f"{file} has {size} bytes instead of {record.size}")
        if record.name.endswith(".safetensors") and manifest.save_id not in _beginning(file):
            raise CheckpointError(f"{file} is not of the same save as the manifest beside it")
    return manifest


def _beginning(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            return opened.read(256).decode("utf-8", errors="replace")
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from None


def is_valid(path: Path) -> bool:
    """Whether check_checkpoint accepts this folder."""
    try:
        check_checkpoint(path)
    except CheckpointError:
        return False
    return True


@dataclass(frozen=True)
class Latest:
    """The newest valid checkpoint, if there is one, and why each newer folder was passed over (newest first)."""

    path: Path | None
    passed_over: tuple[tuple[Path, str], ...]


def latest_checkpoint(folder: Path, look: Look | None = None) -> Latest:
    """Find the newest valid checkpoint in a `checkpoints` folder (which need not exist) that the run has not given up.

    `look` raises CheckpointError for one that is to be passed over although it is whole as far as names and sizes tell.
    """
    passed_over, folders = [], layout.checkpoint_folders(folder)
    left = given_up(folder)
    for path in reversed(folders):
        try:
            if check_checkpoint(path).save_id in left:
                raise CheckpointError(
                    "it was given up when the run went back to an earlier one; its path still takes it"
                )
            if look is not None:
                look(path)
        except CheckpointError as error:
            passed_over.append((path, str(error)))
        else:
            return Latest(path, tuple(passed_over))
    return Latest(None, tuple(passed_over))


def find_checkpoint(source: Path, look: Look | None = None) -> Latest:
    """The checkpoint meant by a user's path: a checkpoint, a run (its newest valid one), or its `checkpoints` folder.

    `look` as in `latest_checkpoint`.
    Raises CheckpointError if a path to one checkpoint is given and that one is not valid, or if there is none.
    """
    if (source / layout.MANIFEST).exists() or layout.step_of(source) is not None:
        if not source.is_dir():
            raise layout.refuse_source(source)
        check_checkpoint(source)
        if look is not None:
            look(source)
        return Latest(source, ())
    folder = layout.holds_checkpoints(source) if source.is_dir() else None
    if folder is None:
        raise layout.refuse_source(source)
    latest = latest_checkpoint(folder, look)
    if latest.path is None:
        reasons = "; ".join(reason for _, reason in latest.passed_over) or "no checkpoint was finished in it"
        raise CheckpointError(f"{folder} holds no valid checkpoint: {reasons}")
    return latest


@dataclass(frozen=True)
class Fault:
    """What is wrong with a file of a checkpoint."""

    file: str
    message: str

    def __str__(self) -> str:
        return f"{self.file}: {self.message}"


def verify_checkpoint(path: Path, *, progress: Progress | None = None) -> tuple[Fault, ...]:
    """Read every byte and compare it with the checksums taken while it was written; all faults found.

    `progress` is told the bytes read so far and in all. Raises CheckpointError if the manifest itself cannot be used.
    """
    manifest = load_head(path)
    total, done = manifest.size, 0
    faults = []
    for number, record in enumerate(manifest.files):
        try:
            size = (path / record.name).stat().st_size
            if size != record.size:
                faults.append(Fault(record.name, f"it has {size} bytes instead of {record.size}"))
            elif checksum_of(path / record.name) != record.xxh3_64:
                faults.append(Fault(record.name, f"it is damaged: {_damage(path, number)}"))
        except FileNotFoundError:
            faults.append(Fault(record.name, "it is missing"))
        except OSError as error:
            faults.append(Fault(record.name, f"it cannot be read: {error.strerror}"))
        done += record.size
        if progress is not None:
            progress(done, total)
    listed = {f.name for f in manifest.files}
    strays = sorted(p.name for p in path.glob("rank-*.safetensors") if p.name not in listed)
    faults += [Fault(name, "it does not belong to this checkpoint") for name in strays]
    return tuple(faults)


def _damage(path: Path, number: int) -> str:
    """Which tensors of a damaged file are affected."""
    try:
        manifest = load_manifest(path)
    except CheckpointError:
        return "so that it is not known which tensors lie where"
    bad = []
    with (path / manifest.files[number].name).open("rb") as file:
        for tensor in manifest.tensors:
            for item in tensor.ranges.in_file(number):
                if _range_checksum(file, item, ITEM_SIZE[tensor.dtype]) != item.xxh3_64:
                    last = item.start + item.length - 1
                    bad.append(f"{tensor.name} ({tensor.kind}), elements {item.start} to {last}")
    if not bad:
        return "in its header, or as a whole if it is no tensor file"
    return "; ".join(bad[:5]) + (f"; and {len(bad) - 5} more" if len(bad) > 5 else "")


def _range_checksum(file: object, item: StoredRange, item_size: int) -> str:
    digest, left = xxhash.xxh3_64(), item.length * item_size
    file.seek(item.offset)  # type: ignore[attr-defined]
    while left and (data := file.read(min(left, CHUNK_BYTES))):  # type: ignore[attr-defined]
        digest.update(data)
        left -= len(data)
    return digest.hexdigest()
