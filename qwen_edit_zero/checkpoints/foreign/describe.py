"""What `qwen-edit-zero checkpoint list|show|verify` print about checkpoints of other programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from qwen_edit_zero.checkpoints.disk import bytes_text
from qwen_edit_zero.checkpoints.foreign.dcp import looks_like_dcp
from qwen_edit_zero.checkpoints.foreign.deepspeed_folder import holds_shards, sorted_tags
from qwen_edit_zero.checkpoints.foreign.recognise import open_foreign
from qwen_edit_zero.checkpoints.foreign.source import ForeignSource, ForeignState
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.flat_state import PARAM
from qwen_edit_zero.safetensors_file import element_count


def list_foreign(source: Path) -> str:
    """A line for each checkpoint in a folder, or for the folder itself. Raises CheckpointError if there is none."""
    inside = [] if holds_shards(source) or looks_like_dcp(source) else sorted_tags(source)
    lines = [str(source)]
    for path in inside or [source]:
        label = path.name if inside else "."
        try:
            state = open_foreign(path)
        except CheckpointError as error:
            lines.append(f"{label}  not usable: {error}")
        else:
            lines.append(
                f"{label}  step {_or_unknown(state.step)}  {_size(state)}  {state.format}  {_ranks(state)}  whole"
            )
    return "\n".join(lines)


def show_foreign(source: Path) -> str:
    """What a checkpoint holds, and what its format does not tell. Raises CheckpointError."""
    state = open_foreign(source)
    lines = [
        str(state.path),
        f"step            {_or_unknown(state.step)}",
        f"samples seen    {_or_unknown(state.samples_seen)}",
        f"by              {state.format}, {_ranks(state)}",
        f"files           {len(state.files)}, {_size(state)} of tensors",
    ]
    if state.optimizer_steps is not None:
        lines.append(f"optimizer steps {state.optimizer_steps}")
    if state.loss_scale is not None:
        lines.append(f"loss scale      {state.loss_scale:g}")
    for role in dict.fromkeys(t.role for t in state.tensors.values() if t.kind == PARAM):
        lines.append(_kind(role or "weights", state, PARAM, role))
    for kind in dict.fromkeys(t.kind for t in state.tensors.values() if t.kind != PARAM):
        lines.append(_kind(kind, state, kind, None))
    for alias, name in list(state.tied.items())[:5]:
        lines.append(f"shared          {alias} is {name}")
    lines += [f"note            {note}" for note in state.notes]
    return "\n".join(lines)


def verify_foreign(source: Path, progress: Callable[[int, int], None] | None = None) -> tuple[str, bool]:
    """Check every byte; the findings, and whether it is sound. Raises CheckpointError if it is not whole."""
    with ForeignSource(open_foreign(source)) as opened:
        faults = opened.verify(progress)
        bare = sum(
            block.stored.crc32 is None for t in opened.state.tensors.values() for block in t.blocks if block.count
        )
    if faults:
        return "\n".join([f"{opened.path} is not sound:", *(f"  {fault}" for fault in faults)]), False
    hedge = f"; {bare} parts have none, and may be damaged" if bare else ""
    return f"{opened.path} is whole, and every byte matches the CRC-32 in its file{hedge}", True


def _kind(label: str, state: ForeignState, kind: str, role: str | None) -> str:
    tensors = [t for t in state.tensors.values() if t.kind == kind and role in (None, t.role)]
    dtypes = "/".join(sorted({t.dtype for t in tensors}))
    elements = sum(element_count(t.shape) for t in tensors)
    size = bytes_text(sum(t.size for t in tensors))
    return f"{label:<15} {len(tensors)} tensors, {elements:,} elements, {dtypes}, {size}"


def _size(state: ForeignState) -> str:
    return bytes_text(sum(t.size for t in state.tensors.values()))


def _ranks(state: ForeignState) -> str:
    return f"{state.world_size} rank{'s' * (state.world_size > 1)}"


def _or_unknown(value: int | None) -> str:
    return "unknown" if value is None else str(value)
