"""How rank 0 learns what every rank wrote: through a file of each, since long lists are nothing for collectives."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from qwen_edit_zero.checkpoints import layout
from qwen_edit_zero.checkpoints.disk import wait_for, write_file
from qwen_edit_zero.checkpoints.manifest import FileRecord, StoredRange, StoredTensor, coverage_fault
from qwen_edit_zero.checkpoints.rank_file import RankPlan
from qwen_edit_zero.errors import CheckpointError, StorageError
from qwen_edit_zero.safetensors_file import element_count


def write_sidecar(path: Path, save_id: str, record: FileRecord, plan: RankPlan, checksums: list[str]) -> None:
    """Tell rank 0, through a file, what this rank wrote: one line for the file, then one line a range."""
    lines = [json.dumps({"save_id": save_id, **record.model_dump()})]
    for p, checksum in zip(plan.ranges, checksums, strict=True):
        lines.append(json.dumps([p.name, p.kind, p.shape, p.dtype, p.offset, p.start, p.length, checksum]))
    write_file(path, "\n".join(lines).encode())


@dataclass(frozen=True)
class _Line:
    """A line of a sidecar: a range and the tensor it belongs to."""

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: str
    stored: StoredRange


def _read_sidecar(path: Path, index: int) -> tuple[str, FileRecord, Iterator[_Line]]:
    """Save id, file record and ranges told by a rank whose file has this index in the manifest."""
    lines = path.read_text(encoding="utf-8").split("\n")
    head = json.loads(lines[0])
    save_id = head.pop("save_id")

    def ranges() -> Iterator[_Line]:
        for line in lines[1:]:
            name, kind, shape, dtype, offset, start, length, checksum = json.loads(line)
            yield _Line(name, kind, tuple(shape), dtype, StoredRange(index, offset, start, length, checksum))

    return save_id, FileRecord(**head), ranges()


def merge_sidecars(partial: Path, save_id: str, world_size: int) -> tuple[list[FileRecord], list[StoredTensor]]:
    """All files (index = rank) and tensors of a save, once every rank has written its share.

    Raises CheckpointError if ranks disagree about a tensor or do not cover it exactly once, StorageError if a file is
    not as its rank wrote it.
    """
    files: list[FileRecord] = []
    shapes: dict[tuple[str, str], tuple[tuple[int, ...], str]] = {}
    ranges: dict[tuple[str, str], list[StoredRange]] = {}
    for rank in range(world_size):
        sidecar = partial / layout.sidecar_file(rank)
        wait_for(sidecar, f"rank 0 cannot see {sidecar.name} of rank {rank}; run.dir must be shared by all nodes")
        told_id, record, lines = _read_sidecar(sidecar, index=rank)
        assert told_id == save_id, f"{sidecar} belongs to another save"
        size = (partial / record.name).stat().st_size
        if size != record.size:
            raise StorageError(f"{record.name} has {size} bytes on disk, but rank {rank} wrote {record.size}")
        files.append(record)
        for line in lines:
            key = (line.kind, line.name)
            known = shapes.setdefault(key, (line.shape, line.dtype))
            if known != (line.shape, line.dtype):
                raise _disagree(line.name, line.kind, known, (line.shape, line.dtype), rank)
            mine = ranges.setdefault(key, [])
            if line.stored.length:
                mine.append(line.stored)
    tensors = []
    for (kind, name), mine in ranges.items():
        mine.sort(key=lambda r: r.start)
        shape, dtype = shapes[kind, name]
        if fault := coverage_fault(element_count(shape), mine):
            owners = sorted({r.file for r in mine})
            raise _engine_fault(f"tensor {name} ({kind}) of shape {list(shape)}, written by ranks {owners}: {fault}")
        tensors.append(StoredTensor(name=name, kind=kind, shape=shape, dtype=dtype, ranges=tuple(mine)))
    return files, tensors


def _disagree(name: str, kind: str, known: object, told: object, rank: int) -> CheckpointError:
    return _engine_fault(f"tensor {name} ({kind}) is {known} for an earlier rank and {told} for rank {rank}")


def _engine_fault(what: str) -> CheckpointError:
    return CheckpointError(f"the engine's ranges do not fit together, so nothing was saved: {what}")
