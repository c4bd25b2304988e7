"""Writing a checkpoint, all ranks together: whole, or not there.

`plan_save` agrees on what is to be written, `write_save` writes it. The second needs no tensor of the engine but
through the bytes it is given, so that it may run in a thread, with a process group of its own, while training goes on.
"""

from __future__ import annotations

import datetime
import json
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_edit_zero import __version__
from qwen_edit_zero.checkpoints import layout
from qwen_edit_zero.checkpoints.columns import write_columns
from qwen_edit_zero.checkpoints.coordination import Coordinator
from qwen_edit_zero.checkpoints.disk import bytes_text, sync_folder, wait_for, write_file
from qwen_edit_zero.checkpoints.frozen import FrozenShare
from qwen_edit_zero.checkpoints.manifest import FileRecord, Json, ManifestFile, ModelReference, dump_manifest
from qwen_edit_zero.checkpoints.placement import clean_leftovers, make_folder, put_in_place
from qwen_edit_zero.checkpoints.rank_file import (
    RangeMaker,
    RankPlan,
    plan_rank_file,
    save_metadata,
    stream_ranges,
    write_rank_file,
)
from qwen_edit_zero.checkpoints.retention import Retention, prune
from qwen_edit_zero.checkpoints.sidecar import merge_sidecars, write_sidecar
from qwen_edit_zero.errors import QwenEditError, StorageError
from qwen_edit_zero.flat_state import FROZEN, FlatRange

if TYPE_CHECKING:
    import torch.distributed as dist

SIDECAR_ROW, TABLE_ROW = 32, 28  # bytes
Data = Iterable[Iterable[memoryview]]  # the bytes of each range, in chunks


@dataclass(frozen=True)
class Contents:
    """What a checkpoint says beside the tensors; equal on all ranks.

    Attributes:
        step: optimizer steps done.
        run_state: JSON values without NaN; `samples_seen` is also put into the manifest.
        settings: the run's settings as JSON values.
        model: what was trained from.
        engine: name of the engine, for information.
        metrics: what is known of this state, lower being better; `Retention.best` may go by it.
    """

    step: int
    run_state: Mapping[str, Json]
    settings: Mapping[str, Json]
    model: ModelReference
    engine: str
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class PlannedSave:
    """A save on which all ranks agree; `plan` is this rank's share, `size` the bytes of all ranks together."""

    folder: Path
    contents: Contents
    state_text: bytes
    save_id: str
    plan: RankPlan
    size: int
    frozen: FrozenShare | None = None
    may_write: Callable[[], None] = lambda: None  # raises on rank 0 once the folder belongs to another run

    @property
    def changing(self) -> RankPlan:
        """What training changes of this rank's share, which is what `write_save` must be given: all but the frozen."""
        return self.plan.before(FROZEN)

    @property
    def final(self) -> Path:
        """Where the checkpoint will be."""
        return self.folder / layout.checkpoint_name(self.contents.step)

    @property
    def partial(self) -> Path:
        """Where it grows."""
        return layout.partial_folder(self.folder, self.contents.step, self.save_id)

    @property
    def doing(self) -> str:
        """For messages."""
        return f"writing {self.final}"


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    ranges: Callable[[], Iterable[FlatRange]] | Iterable[FlatRange],
    run_state: Mapping[str, Json],
    settings: Mapping[str, Json],
    model: ModelReference,
    engine: str,
    metrics: Mapping[str, float] | None = None,
    frozen: FrozenShare | None = None,
    retention: Retention | None = None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write `folder/step-XXXXXXXX`. Collective over torch.distributed if it is started, else single-process.

    Every rank streams its ranges into its own file of a hidden folder; rank 0 checks that they cover each element of
    each tensor once, writes the manifest last and renames the folder. A checkpoint of the same step that is there
    already is replaced, in such a way that at any moment either the old or the new one is whole.

    Args:
        folder: the run's `checkpoints` folder, on a file system that all ranks see; made if missing.
        step, run_state, settings, model, engine, metrics: see `Contents`.
        ranges: what this rank owns. Give a function (`engine.local_state`): it is called twice, once for the layout
            and once to stream, so that only one chunk is in memory. An iterable is kept as a list. It must involve
            no other rank.
        frozen: frozen parameters that this rank is to write as well, if the model's reference says so.
        retention: which others may stay afterwards; None: all.
        group: the ranks that take part; None: all.

    Returns: the checkpoint's folder, the same on every rank.

    Raises: the same error on every rank. StorageError: disk full, folder read-only or not shared by the nodes;
        nothing that counts as a checkpoint is left of this one, and earlier ones are untouched. CheckpointError:
        the ranges leave out or repeat an element. RunError: anything else that went wrong on a rank.
    """
    ranks = Coordinator(group)
    make_ranges = _range_maker(ranges)
    contents = Contents(step, run_state, settings, model, engine, metrics or {})
    with ranks.together(f"writing {folder}"):
        if ranks.rank == 0:
            make_folder(folder)
    save = plan_save(folder, contents, make_ranges, ranks, frozen)
    final = write_save(save, stream_ranges(save.changing, make_ranges), ranks)
    if retention is not None:
        with ranks.together(f"{final} is whole, but deleting older ones"):
            if ranks.rank == 0:
                prune(folder, retention, newest=final)
    return final


def _range_maker(ranges: Callable[[], Iterable[FlatRange]] | Iterable[FlatRange]) -> RangeMaker:
    if callable(ranges):
        return ranges
    kept = list(ranges)
    return lambda: kept


def plan_save(
    folder: Path,
    contents: Contents,
    make_ranges: RangeMaker,
    ranks: Coordinator,
    frozen: FrozenShare | None = None,
    may_write: Callable[[], None] = lambda: None,
) -> PlannedSave:
    """Agree on a save; looks at names, shapes and dtypes of the ranges only. Collective."""
    assert (frozen is not None) == contents.model.frozen_stored
    told = ranks.gather((contents.step, uuid.uuid4().hex))
    assert {t[0] for t in told} == {contents.step}, f"ranks save different steps: {sorted({t[0] for t in told})}"
    save_id = told[0][1]
    with ranks.together(f"writing {folder / layout.checkpoint_name(contents.step)}"):
        state_text = json.dumps(dict(contents.run_state), indent=1, ensure_ascii=False, allow_nan=False).encode()
        every_range = make_ranges if frozen is None else lambda: chain(make_ranges(), frozen.ranges())
        plan = plan_rank_file(every_range, save_metadata(save_id, ranks.rank, ranks.world_size, contents.step))
    size = sum(ranks.gather(plan.size + len(plan.ranges) * (SIDECAR_ROW + TABLE_ROW)))
    return PlannedSave(folder, contents, state_text, save_id, plan, size, frozen, may_write)


def write_save(save: PlannedSave, data: Data, ranks: Coordinator) -> Path:
    """Write a planned save, `data` being the bytes of `save.changing`. Collective; see `save_checkpoint`."""
    partial = save.partial
    try:
        with ranks.together(save.doing):
            if ranks.rank == 0:
                _open_partial(save)
        with ranks.together(save.doing):
            _write_share(save, data, ranks)
        with ranks.together(save.doing):
            if ranks.rank == 0:
                _publish(save, ranks.world_size)
    except QwenEditError:
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            save.may_write()  # a newer run deletes what this one was writing; then that is the reason to be told
        raise
    return save.final


def _open_partial(save: PlannedSave) -> None:
    folder, final = save.folder, save.final
    if not folder.is_dir():
        raise StorageError(
            f"{folder} is no longer there: it was deleted or moved, or the file system it was on is not mounted any "
            "more; earlier checkpoints are where it is now"
        )
    save.may_write()
    clean_leftovers(folder)
    if final.exists() and not final.is_dir():
        raise StorageError(f"{final} is a file; move it away")
    check_space(folder, save.size)
    save.partial.mkdir()
    write_file(save.partial / f".save-{save.save_id}", b"")
    sync_folder(save.partial)


def check_space(folder: Path, size: int) -> None:
    """Raise StorageError if the file system of `folder` has less than `size` bytes free."""
    free = shutil.disk_usage(folder)
    if free.total and free.free < size:
        raise StorageError(
            f"the checkpoint needs {bytes_text(size)}, and {folder} has {bytes_text(free.free)} free; "
            "free some space or lower checkpoint.keep. Earlier checkpoints are untouched"
        )


def _write_share(save: PlannedSave, data: Data, ranks: Coordinator) -> None:
    partial = save.partial
    wait_for(
        partial / f".save-{save.save_id}",
        f"{partial}, made by rank 0, is not visible here; run.dir must be on a file system that all nodes share",
    )
    if save.frozen is not None:
        data = chain(data, save.frozen.data())
    record, checksums = write_rank_file(partial / layout.rank_file(ranks.rank), save.plan, data)
    write_sidecar(partial / layout.sidecar_file(ranks.rank), save.save_id, record, save.plan, checksums)
    sync_folder(partial)


def _publish(save: PlannedSave, world_size: int) -> None:
    """Check what the ranks wrote, write the manifest last, give the folder its name."""
    partial, contents = save.partial, save.contents
    merged = merge_sidecars(partial, save.save_id, world_size)
    files = merged.files
    metadata = {"save_id": save.save_id, "step": str(contents.step)}
    ranges = write_columns(partial / layout.RANGES, merged.table.columns(), metadata)
    files.append(FileRecord(name=layout.RANGES, size=ranges.size, xxh3_64=ranges.checksum))
    state = write_file(partial / layout.RUN_STATE, save.state_text)
    files.append(FileRecord(name=layout.RUN_STATE, size=state.size, xxh3_64=state.checksum))
    manifest = ManifestFile(
        save_id=save.save_id,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        package_version=__version__,
        step=contents.step,
        samples_seen=contents.run_state.get("samples_seen"),
        engine=contents.engine,
        world_size=world_size,
        metrics=dict(contents.metrics),
        settings=dict(contents.settings),
        model=contents.model,
        files=tuple(files),
        tensors=tuple(merged.tensors),
    )
    for rank in range(world_size):
        (partial / layout.sidecar_file(rank)).unlink()
    (partial / f".save-{save.save_id}").unlink()
    temporary = partial / (layout.MANIFEST + ".tmp")
    write_file(temporary, dump_manifest(manifest))
    temporary.rename(partial / layout.MANIFEST)
    sync_folder(partial)
    save.may_write()
    put_in_place(partial, save.final, contents.step)
