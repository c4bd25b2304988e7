"""Writing a checkpoint, all ranks together: whole, or not there."""

from __future__ import annotations

import datetime
import json
import shutil
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_edit_zero import __version__
from qwen_edit_zero.checkpoints import layout
from qwen_edit_zero.checkpoints.backup import backup_checkpoint
from qwen_edit_zero.checkpoints.coordination import Coordinator
from qwen_edit_zero.checkpoints.disk import bytes_text, sync_folder, wait_for, write_file
from qwen_edit_zero.checkpoints.manifest import FileRecord, Json, Manifest, ModelReference, dump_manifest
from qwen_edit_zero.checkpoints.placement import clean_leftovers, put_in_place
from qwen_edit_zero.checkpoints.rank_file import RangeMaker, RankPlan, plan_rank_file, save_metadata, write_rank_file
from qwen_edit_zero.checkpoints.retention import prune
from qwen_edit_zero.checkpoints.sidecar import merge_sidecars, write_sidecar
from qwen_edit_zero.errors import QwenEditError, StorageError
from qwen_edit_zero.flat_state import FlatRange

if TYPE_CHECKING:
    import torch.distributed as dist


def save_checkpoint(
    folder: Path,
    *,
    step: int,
    ranges: Callable[[], Iterable[FlatRange]] | Iterable[FlatRange],
    run_state: Mapping[str, Json],
    settings: Mapping[str, Json],
    model: ModelReference,
    engine: str,
    keep: int | None = None,
    backup: Path | None = None,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Write `folder/step-XXXXXXXX`. Collective over torch.distributed if it is started, else single-process.

    Every rank streams its ranges into its own file of a hidden folder; rank 0 checks that they cover each element of
    each tensor once, writes the manifest last and renames the folder. A checkpoint of the same step that is there
    already is replaced, in such a way that at any moment either the old or the new one is whole.

    Args:
        folder: the run's `checkpoints` folder, on a file system that all ranks see; made if missing.
        step: optimizer steps done.
        ranges: what this rank owns. Give a function (`engine.local_state`): it is called twice, once for the layout
            and once to stream, so that only one chunk is in memory. An iterable is kept as a list. It must involve
            no other rank.
        run_state: JSON values without NaN, equal on all ranks; `samples_seen` is also put into the manifest.
        settings: the run's settings as JSON values.
        model: what was trained from.
        engine: name of the engine, for information.
        keep: afterwards, delete all but the newest `keep` valid checkpoints, never the one just written. None: all
            stay.
        backup: a folder that then gets a verified copy.
        group: the ranks that take part; None: all.

    Returns: the checkpoint's folder, the same on every rank.

    Raises: the same error on every rank. StorageError: disk full, folder read-only or not shared by the nodes;
        nothing that counts as a checkpoint is left of this one, and earlier ones are untouched. CheckpointError:
        the ranges leave out or repeat an element.
    """
    ranks = Coordinator(group)
    make_ranges = _range_maker(ranges)
    final, partial = folder / layout.checkpoint_name(step), layout.partial_folder(folder, step)
    doing = f"writing {final}"
    told = ranks.gather((step, uuid.uuid4().hex))
    assert {t[0] for t in told} == {step}, f"ranks save different steps: {sorted({t[0] for t in told})}"
    save_id = told[0][1]
    with ranks.together(doing):
        state_text = json.dumps(dict(run_state), indent=1, ensure_ascii=False, allow_nan=False).encode()
        plan = plan_rank_file(make_ranges, save_metadata(save_id, ranks.rank, ranks.world_size, step))
    size = sum(ranks.gather(plan.size))
    try:
        with ranks.together(doing):
            if ranks.rank == 0:
                _open_partial(folder, partial, final, save_id, size)
        with ranks.together(doing):
            _write_share(partial, plan, make_ranges, save_id, ranks)
        with ranks.together(doing):
            if ranks.rank == 0:
                files, tensors = merge_sidecars(partial, save_id, ranks.world_size)
                state = write_file(partial / layout.RUN_STATE, state_text)
                files.append(FileRecord(name=layout.RUN_STATE, size=state.size, xxh3_64=state.checksum))
                manifest = Manifest(
                    save_id=save_id,
                    created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                    package_version=__version__,
                    step=step,
                    samples_seen=run_state.get("samples_seen"),
                    engine=engine,
                    world_size=ranks.world_size,
                    settings=dict(settings),
                    model=model,
                    files=tuple(files),
                    tensors=tuple(tensors),
                )
                _commit(partial, final, manifest)
    except QwenEditError:
        if ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if keep is not None or backup is not None:
        with ranks.together(f"{final} is whole, but looking after it"):
            if ranks.rank == 0:
                if backup is not None:
                    backup_checkpoint(final, backup)
                if keep is not None:
                    prune(folder, keep, protect=final)
    return final


def _range_maker(ranges: Callable[[], Iterable[FlatRange]] | Iterable[FlatRange]) -> RangeMaker:
    if callable(ranges):
        return ranges
    kept = list(ranges)
    return lambda: kept


def _open_partial(folder: Path, partial: Path, final: Path, save_id: str, size: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    clean_leftovers(folder)
    if final.exists() and not final.is_dir():
        raise StorageError(f"{final} is a file; move it away")
    free = shutil.disk_usage(folder)
    if free.total and free.free < size:
        raise StorageError(
            f"the checkpoint needs {bytes_text(size)}, and {folder} has {bytes_text(free.free)} free; "
            "free some space or lower checkpoint.keep. Earlier checkpoints are untouched"
        )
    partial.mkdir()
    write_file(partial / f".save-{save_id}", b"")
    sync_folder(partial)


def _write_share(partial: Path, plan: RankPlan, make_ranges: RangeMaker, save_id: str, ranks: Coordinator) -> None:
    wait_for(
        partial / f".save-{save_id}",
        f"{partial}, made by rank 0, is not visible here; run.dir must be on a file system that all nodes share",
    )
    record, checksums = write_rank_file(partial / layout.rank_file(ranks.rank), plan, make_ranges)
    write_sidecar(partial / layout.sidecar_file(ranks.rank), save_id, record, plan, checksums)
    sync_folder(partial)


def _commit(partial: Path, final: Path, manifest: Manifest) -> None:
    for rank in range(manifest.world_size):
        (partial / layout.sidecar_file(rank)).unlink()
    (partial / f".save-{manifest.save_id}").unlink()
    temporary = partial / (layout.MANIFEST + ".tmp")
    write_file(temporary, dump_manifest(manifest))
    temporary.rename(partial / layout.MANIFEST)
    sync_folder(partial)
    put_in_place(partial, final, manifest.step)
