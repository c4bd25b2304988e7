"""What `qwen-edit-zero checkpoint list|show|verify` print."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from qwen_edit_zero.checkpoints import layout
from qwen_edit_zero.checkpoints.disk import bytes_text
from qwen_edit_zero.checkpoints.foreign.describe import list_foreign, show_foreign, verify_foreign
from qwen_edit_zero.checkpoints.foreign.recognise import is_foreign
from qwen_edit_zero.checkpoints.given_up import given_up
from qwen_edit_zero.checkpoints.manifest import Json, StoredTensor
from qwen_edit_zero.checkpoints.optimizer_groups import GROUPS, saved_groups, shown_names
from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.checkpoints.validity import Progress, check_checkpoint, find_checkpoint, verify_checkpoint
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.safetensors_file import ITEM_SIZE, element_count

PARAMETER_STEPS = "parameter_steps"  # among an engine's counters


def list_checkpoints(source: Path) -> str:
    """A line for each checkpoint of a run (or `checkpoints` folder), oldest first, damaged ones with the reason.

    Raises CheckpointError if the path is neither.
    """
    folder = layout.holds_checkpoints(source) if source.is_dir() else None
    if folder is None and is_foreign(source):
        return list_foreign(source)
    if folder is None:
        raise layout.refuse_source(source)
    rows, reasons = [("step", "samples", "size", "engine", "ranks", "written (UTC)", "state")], []
    left = given_up(folder)
    for path in layout.checkpoint_folders(folder):
        try:
            m = check_checkpoint(path)
        except CheckpointError as error:
            rows.append((str(layout.step_of(path)), "", "", "", "", "", "not usable"))
            reasons.append(f"{path.name}: {error}")
        else:
            seen = "" if m.samples_seen is None else str(m.samples_seen)
            state = "given up" if m.save_id in left else "whole"
            rows.append((str(m.step), seen, bytes_text(m.size), m.engine, str(m.world_size), m.created[:19], state))
    for hidden in layout.hidden_folders(folder):
        if hidden.state == "partial":
            reasons.append(f"{hidden.path.name}: being written, or left by a run that died; the next save removes it")
    if len(rows) == 1:
        return "\n".join([f"{folder} holds no checkpoint", *reasons])
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([str(folder), *lines, *reasons])


def show_checkpoint(source: Path) -> str:
    """What a checkpoint holds: counters, model, tensors of each kind. Raises CheckpointError."""
    if is_foreign(source):
        return show_foreign(source)
    path = find_checkpoint(source).path
    assert path is not None
    with CheckpointReader(path) as reader:
        manifest, state = reader.manifest, reader.run_state
        kinds = reader.kinds()
    model = manifest.model
    lines = [
        str(path),
        f"step            {manifest.step}",
        f"samples seen    {'unknown' if manifest.samples_seen is None else manifest.samples_seen}",
        *(f"{name:<15} {value:.6g}" for name, value in manifest.metrics.items()),
        f"written         {manifest.created}, format {manifest.format_version}",
        f"by              {manifest.engine} on {manifest.world_size} rank{'s' * (manifest.world_size > 1)}, "
        f"qwen-edit-zero {manifest.package_version}",
        f"files           {len(manifest.files)}, {bytes_text(manifest.size)}",
        f"model           {model.path} (fingerprint {model.fingerprint})",
        f"frozen          {len(model.frozen)} tensors, in the model folder{' and here' * model.frozen_stored}",
    ]
    if model.lora is not None:
        targets = ", ".join(model.lora.targets)
        lines.append(f"lora            rank {model.lora.rank}, alpha {model.lora.alpha:g}, on {targets}")
    for kind in kinds:
        tensors = [t for t in manifest.tensors if t.kind == kind]
        count = sum(element_count(t.shape) for t in tensors)
        dtypes = "/".join(sorted({t.dtype for t in tensors}))
        lines.append(f"{kind:<15} {len(tensors)} tensors, {count:,} elements, {dtypes}, {bytes_text(_bytes(tensors))}")
    lines += [f"run state       {name:<26} {value}" for name, value in _readable(state)]
    lines += [f"optimizer group {group}" for group in saved_groups(state)]
    return "\n".join(lines)


def verify_text(source: Path, progress: Progress | None = None) -> tuple[str, bool]:
    """Check every byte of a checkpoint; the findings, and whether it is sound. Raises CheckpointError."""
    if is_foreign(source):
        return verify_foreign(source, progress)
    found = find_checkpoint(source)
    assert found.path is not None
    faults = verify_checkpoint(found.path, progress=progress)
    if not faults:
        return f"{found.path} is sound: every byte is as it was written", True
    return "\n".join([f"{found.path} is not sound:", *(f"  {f.file}: {f.message}" for f in faults)]), False


def _readable(values: Mapping[str, Json], before: str = "") -> Iterator[tuple[str, str]]:
    """Nested values as lines: `engine.optimizer_steps` and `200`."""
    for key, value in values.items():
        if key == GROUPS and not before:
            continue
        if key == PARAMETER_STEPS:
            yield f"{before}{key}", f"{len(value)} parameters have done fewer steps ({shown_names([*value])})"
        elif isinstance(value, dict):
            yield from _readable(value, f"{before}{key}.")
        elif isinstance(value, list):
            yield f"{before}{key}", ", ".join(map(str, value)) or "none"
        else:
            yield f"{before}{key}", "none" if value is None else str(value)


def _bytes(tensors: list[StoredTensor]) -> int:
    return sum(element_count(t.shape) * ITEM_SIZE[t.dtype] for t in tensors)
