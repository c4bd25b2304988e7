"""How rank 0 learns what every rank wrote: through a file of each, since long lists are nothing for collectives."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from qwen_edit_zero.checkpoints import layout
from qwen_edit_zero.checkpoints.columns import Column, parse_columns, write_columns
from qwen_edit_zero.checkpoints.disk import wait_for
from qwen_edit_zero.checkpoints.manifest import FileRecord, TensorRecord
from qwen_edit_zero.checkpoints.ranges import RangeTable, StoredRange, coverage_fault
from qwen_edit_zero.checkpoints.rank_file import RankPlan
from qwen_edit_zero.errors import CheckpointError, StorageError
from qwen_edit_zero.safetensors_file import element_count

Integers = npt.NDArray[np.int64]


def write_sidecar(path: Path, save_id: str, record: FileRecord, plan: RankPlan, checksums: list[str]) -> None:
    """Tell rank 0, through a file, what this rank wrote: its tensors (a line of JSON each) and a row a range."""
    numbers: dict[str, int] = {}
    tensor = [
        numbers.setdefault(json.dumps([p.name, p.kind, p.shape, p.dtype], ensure_ascii=False), len(numbers))
        for p in plan.ranges
    ]
    columns: dict[str, Column] = {
        "tensor": np.array(tensor, np.int32),
        "offset": np.array([p.offset for p in plan.ranges], np.int64),
        "start": np.array([p.start for p in plan.ranges], np.int64),
        "length": np.array([p.length for p in plan.ranges], np.int64),
        "xxh3_64": np.array([int(checksum, 16) for checksum in checksums], np.uint64),
        "lines": np.frombuffer("\n".join(numbers).encode(), np.uint8),
    }
    write_columns(path, columns, {"save_id": save_id, "file": record.model_dump_json()})


@dataclass(frozen=True)
class MergedRanges:
    """What all ranks wrote: files (index = rank), tensors in the order of their first appearance, their ranges."""

    files: list[FileRecord]
    tensors: list[TensorRecord]
    table: RangeTable


class _Tensors:
    """Numbers the tensors of all ranks, whose lists have most lines in common."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str, tuple[int, ...], str]] = []  # name, kind, shape, dtype
        self._numbers: dict[tuple[str, str], int] = {}
        self._lines: dict[bytes, int] = {}
        self._lists: dict[bytes, npt.NDArray[np.int32]] = {}

    def numbers(self, lines: bytes, rank: int) -> npt.NDArray[np.int32]:
        """The number of the tensor in each line. Raises CheckpointError if an earlier rank told it differently."""
        if lines not in self._lists:
            told = [self._number(line, rank) for line in lines.split(b"\n")] if lines else []
            self._lists[lines] = np.array(told, np.int32)
        return self._lists[lines]

    def _number(self, line: bytes, rank: int) -> int:
        if line not in self._lines:
            name, kind, shape, dtype = json.loads(line)
            number = self._numbers.setdefault((name, kind), len(self.found))
            told = (name, kind, tuple(shape), dtype)
            if number == len(self.found):
                self.found.append(told)
            if self.found[number] != told:
                raise _engine_fault(
                    f"tensor {name} ({kind}) is {self.found[number][2:]} for an earlier rank and {told[2:]} for "
                    f"rank {rank}"
                )
            self._lines[line] = number
        return self._lines[line]


def merge_sidecars(partial: Path, save_id: str, world_size: int) -> MergedRanges:
    """Everything that was saved, once every rank has written its share.

    Raises CheckpointError if ranks disagree about a tensor or do not cover it exactly once, StorageError if a file is
    not as its rank wrote it.
    """
    files, tensors, parts = [], _Tensors(), []
    for rank in range(world_size):
        record, columns = _read_sidecar(partial, rank, save_id)
        files.append(record)
        numbers = tensors.numbers(columns["lines"].tobytes(), rank)
        some = columns["length"] > 0
        part = {name: columns[name][some] for name in ("offset", "start", "length", "xxh3_64")}
        part["tensor"] = numbers[columns["tensor"][some]]
        part["file"] = np.full(int(some.sum()), rank, np.int32)
        parts.append(part)
    rows = {name: np.concatenate([part.pop(name) for part in parts]) for name in list(parts[0])}
    order = np.lexsort((rows["start"], rows["tensor"]))
    rows = {name: column[order] for name, column in rows.items()}
    counts = np.bincount(rows["tensor"], minlength=len(tensors.found))
    _check_coverage(tensors, rows, counts)
    records = [
        TensorRecord(name=name, kind=kind, shape=shape, dtype=dtype, ranges=int(count))
        for (name, kind, shape, dtype), count in zip(tensors.found, counts, strict=True)
    ]
    return MergedRanges(files, records, RangeTable(rows["file"], rows["offset"], rows["start"], rows["xxh3_64"]))


def _read_sidecar(partial: Path, rank: int, save_id: str) -> tuple[FileRecord, dict[str, Column]]:
    sidecar = partial / layout.sidecar_file(rank)
    wait_for(sidecar, f"rank 0 cannot see {sidecar.name} of rank {rank}; run.dir must be shared by all nodes")
    metadata, columns = parse_columns(sidecar.read_bytes())
    assert metadata["save_id"] == save_id, f"{sidecar} belongs to another save"
    record = FileRecord.model_validate_json(metadata["file"])
    size = (partial / record.name).stat().st_size
    if size != record.size:
        raise StorageError(f"{record.name} has {size} bytes on disk, but rank {rank} wrote {record.size}")
    return record, columns


def _check_coverage(tensors: _Tensors, rows: dict[str, Column], counts: Integers) -> None:
    """Raise CheckpointError naming the first tensor that is not covered exactly once. `rows` are sorted."""
    elements = np.array([element_count(shape) for _, _, shape, _ in tensors.found], np.int64)
    first = np.cumsum(counts) - counts  # of each tensor: its first row
    ends = rows["start"] + rows["length"]
    expected = np.roll(ends, 1)
    expected[first[counts > 0]] = 0
    reached = np.zeros(len(counts), np.int64)
    reached[counts > 0] = ends[(first + counts - 1)[counts > 0]]
    bad = reached != elements
    bad[rows["tensor"][rows["start"] != expected]] = True
    if not bad.any():
        return
    number = int(np.flatnonzero(bad)[0])
    name, kind, shape, _ = tensors.found[number]
    mine = slice(int(first[number]), int(first[number] + counts[number]))
    ranges = [
        StoredRange(int(file), 0, int(start), int(length), "")
        for file, start, length in zip(rows["file"][mine], rows["start"][mine], rows["length"][mine], strict=True)
    ]
    fault = coverage_fault(element_count(shape), ranges)
    owners = sorted({r.file for r in ranges})
    shown = f"{owners[:8]}" + (f" and {len(owners) - 8} more" if len(owners) > 8 else "")
    raise _engine_fault(f"tensor {name} ({kind}) of shape {list(shape)}, written by ranks {shown}: {fault}")


def _engine_fault(what: str) -> CheckpointError:
    return CheckpointError(f"the engine's ranges do not fit together, so nothing was saved: {what}")
