"""From a checkpoint to a model folder that diffusers loads, as a stream with bounded memory. Imports no torch."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qwen_edit_zero import __version__
from qwen_edit_zero.checkpoints.base_model import BaseModel, OpenModel
from qwen_edit_zero.checkpoints.components import Components, add_components
from qwen_edit_zero.checkpoints.consolidation_foreign import plan_foreign
from qwen_edit_zero.checkpoints.consolidation_journal import Journal, identity_of
from qwen_edit_zero.checkpoints.consolidation_output import WEIGHTS, OutputFile, OutputTensor, index_of, lay_out
from qwen_edit_zero.checkpoints.consolidation_plan import EMA, FilesOfThreads, Sources, plan_tensors
from qwen_edit_zero.checkpoints.consolidation_writer import Progress, default_threads, write_files
from qwen_edit_zero.checkpoints.disk import bytes_text, sync_folder, write_file
from qwen_edit_zero.checkpoints.foreign.recognise import is_foreign, open_foreign
from qwen_edit_zero.checkpoints.foreign.source import ForeignSource
from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.checkpoints.validity import find_checkpoint
from qwen_edit_zero.errors import CheckpointError, StorageError
from qwen_edit_zero.flat_state import PARAM

PROVENANCE = "consolidated.json"
SHARD_BYTES = 10 * 10**9  # the default of diffusers
DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}

Dtype = Literal["bf16", "fp16", "fp32"]
Weights = Literal["model", "ema"]


def consolidate(
    source: Path,
    out: Path,
    *,
    dtype: Dtype,
    open_model: OpenModel,
    base_model: Path | None = None,
    weights: Weights = "model",
    fill: bool = False,
    shard_bytes: int = SHARD_BYTES,
    components: Components = "link",
    overwrite: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Write the trained model in diffusers layout; the folder appears whole or not at all.

    Everything read is compared with its checksum. Of our own checkpoints, frozen parameters come from the base model
    and adapters are merged into it. DeepSpeed and DCP folders are recognised by what is in them; they have no base
    model of their own: without `base_model`, their weights alone are written.

    Args:
        source: a checkpoint folder, or a run (or its `checkpoints` folder): then its newest valid checkpoint; or a
            DeepSpeed folder (or a folder of its tags), or a DCP folder.
        out: folder to make; must not exist or be empty. If an earlier call was interrupted, this one goes on from what
            is there in `.NAME.partial` beside it.
        dtype: of the floating-point weights written; others keep theirs.
        open_model: opens a model folder by path, or `tiny`.
        base_model: where the model trained from is now; None: where it was then.
        weights: `ema` for the running average, if the run kept one.
        fill: take parameters that a DeepSpeed or DCP folder lacks from the base model.
        shard_bytes: the most a weight file holds, unless a single tensor is larger.
        components: how VAE, text encoder, tokenizer, ... come along; see `add_components`.
        overwrite: replace `out` if it was written by this function before.
        threads: that read, convert and write; None: one a processor, up to four.
        progress: told the bytes written so far and in all, from any thread.
        say: told which checkpoint was chosen, how names were resolved, what was left out.

    Returns `out`. Raises CheckpointError or ModelFolderError before anything is written if checkpoint and model are not
    whole or do not belong together; CheckpointError if damage or a value too large for `dtype` is met on the way;
    StorageError if writing fails.
    """
    options = _Options(dtype, shard_bytes, components, threads or default_threads(), progress or _silent)
    if is_foreign(source):
        if weights != "model":
            raise CheckpointError(
                f"{source} is of another program, whose averaged weights are not known; leave out --weights"
            )
        return _consolidate_foreign(source, out, open_model, base_model, fill, overwrite, options, say)
    found = find_checkpoint(source)
    assert found.path is not None
    for path, reason in found.passed_over:
        say(f"passing over {path.name}: {reason}")
    if found.path != source:
        say(f"using {found.path}, the newest valid checkpoint")
    _refuse_out(out, found.path, overwrite)
    with CheckpointReader(found.path) as reader:
        manifest = reader.manifest
        base = open_model(str(base_model) if base_model else manifest.model.path)
        sources = Sources(reader)
        kind = EMA if weights == "ema" else PARAM
        try:
            job = _Job(
                source=f"{manifest.save_id} {kind} {base.fingerprint}",
                tensors=plan_tensors(reader, base, DTYPES[dtype], sources, kind=kind),
                base=base,
                config=manifest.model.config,
                provenance={
                    "checkpoint": str(reader.path),
                    "save_id": manifest.save_id,
                    "step": manifest.step,
                    "samples_seen": manifest.samples_seen,
                    "weights": weights,
                    "base_model": manifest.model.path,
                    "base_model_fingerprint": manifest.model.fingerprint,
                },
            )
            _write_folder(job, out, options)
        finally:
            sources.close()
    return out


def _consolidate_foreign(
    source: Path,
    out: Path,
    open_model: OpenModel,
    base_model: Path | None,
    fill: bool,
    overwrite: bool,
    options: _Options,
    say: Callable[[str], None],
) -> Path:
    state = open_foreign(source)
    step = "unknown" if state.step is None else state.step
    say(f"{state.path}: {state.format}, {state.world_size} ranks, step {step}")
    _refuse_out(out, state.path, overwrite)
    base = open_model(str(base_model)) if base_model else None
    stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in state.files]
    files = FilesOfThreads()
    try:
        with ForeignSource(state) as opened:
            job = _Job(
                source=f"{state.path.resolve()} {stats} {base.fingerprint if base else ''}",
                tensors=plan_foreign(opened, base, DTYPES[options.dtype], files.get, fill=fill, say=say),
                base=base,
                config=base.transformer_config if base else None,
                provenance={
                    "checkpoint": str(state.path),
                    "format": state.format,
                    "step": state.step,
                    "samples_seen": state.samples_seen,
                    "tied": state.tied,
                    "base_model": str(base.path) if base else None,
                    "base_model_fingerprint": base.fingerprint if base else None,
                },
                finish=opened.finish,
            )
            _write_folder(job, out, options)
    finally:
        files.close()
    return out


@dataclass(frozen=True)
class _Options:
    """How to write."""

    dtype: Dtype
    shard_bytes: int
    components: Components
    threads: int
    progress: Progress


@dataclass(frozen=True)
class _Job:
    """What to write. `source` identifies it; `finish` compares checksums at the end."""

    source: str
    tensors: Sequence[OutputTensor]
    base: BaseModel | None
    config: Mapping[str, Any] | None
    provenance: Mapping[str, object]
    finish: Callable[[], None] = lambda: None


def _silent(done: int, total: int) -> None:
    pass


def _refuse_out(out: Path, checkpoint: Path, overwrite: bool) -> None:
    if out.resolve().is_relative_to(checkpoint.resolve()):
        raise CheckpointError(f"{out} lies inside the checkpoint {checkpoint}; choose a folder outside")
    if not out.exists():
        return
    if not out.is_dir():
        raise CheckpointError(f"{out} is a file; choose a new folder")
    if any(out.iterdir()) and not (overwrite and (out / PROVENANCE).exists()):
        if not overwrite:
            hint = "choose a new folder, or use --overwrite to replace it"
        else:
            hint = f"it has no {PROVENANCE}, so it was not written by this command and is not replaced"
        raise CheckpointError(f"{out} is not empty: {hint}")
    if foreign := sorted(_names(out) - _written(out) - {PROVENANCE}) if any(out.iterdir()) else []:
        raise CheckpointError(
            f"{out} holds {foreign[0]} ({len(foreign)} such), which this command did not write and would delete with "
            "the rest; move it away, or choose a new folder"
        )


def _names(folder: Path) -> set[str]:
    """Everything in a folder but the folders in it, by relative path."""
    return {
        str(Path(root, name).relative_to(folder))
        for root, folders, files in os.walk(folder)
        for name in [*files, *(name for name in folders if Path(root, name).is_symlink())]
    }


def _written(out: Path) -> set[str]:
    """What the call that made `out` wrote into it."""
    try:
        return set(json.loads((out / PROVENANCE).read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{out / PROVENANCE} does not say which files this command wrote ({error}); choose a new folder"
        ) from error


def _write_folder(job: _Job, out: Path, options: _Options) -> None:
    partial = out.with_name(f".{out.name}.partial")
    weights = partial / "transformer" if job.base else partial
    files = lay_out(job.tensors, options.shard_bytes)
    identity = identity_of(job.source, files)
    try:
        _open_partial(partial, weights, identity, sum(f.size for f in files))
        _write_weights(job, weights, files, identity, options)
        if job.base is not None:
            config = {"_class_name": "QwenImageTransformer2DModel", **(job.config or {})}
            _write_json(weights / "config.json", config)
            add_components(job.base.path, partial, options.components)
        provenance = {"written_by": f"qwen-edit-zero {__version__}", **job.provenance, "dtype": options.dtype}
        provenance["files"] = sorted(_names(partial))
        _write_json(partial / PROVENANCE, provenance)
        sync_folder(weights)
        sync_folder(partial)
        _give_name(partial, out)
    except Exception as error:  # not when it is interrupted: then the next call goes on
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            where = f" ({error.filename})" if error.filename else ""
            raise StorageError(
                f"writing {out} failed: {error.strerror or error}{where}; nothing is left of it"
            ) from error
        raise


def _open_partial(partial: Path, weights: Path, identity: str, size: int) -> None:
    """Make room for the weights, or keep what an interrupted call has written of the same."""
    partial.parent.mkdir(parents=True, exist_ok=True)
    there = 0
    if Journal.is_of(weights, identity):
        there = sum(p.stat().st_blocks * 512 for p in weights.glob(f"{WEIGHTS}*"))
        for path in partial.iterdir() if weights != partial else ():
            if path.is_dir() and path != weights:
                shutil.rmtree(path)
    else:
        shutil.rmtree(partial, ignore_errors=True)
    free = shutil.disk_usage(partial.parent).free
    if free < size - there:
        raise StorageError(
            f"the weights need {bytes_text(size - there)}, and {partial.parent} has {bytes_text(free)} free"
        )
    weights.mkdir(parents=True, exist_ok=True)


def _write_weights(job: _Job, folder: Path, files: Sequence[OutputFile], identity: str, options: _Options) -> None:
    journal = Journal(folder, identity)
    try:
        write_files(folder, files, journal, threads=options.threads, progress=options.progress)
        job.finish()
        journal.remove()
    finally:
        journal.close()
    if len(files) > 1:
        _write_json(folder / f"{WEIGHTS}.safetensors.index.json", index_of(files))


def _write_json(path: Path, value: object) -> None:
    write_file(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def _give_name(partial: Path, out: Path) -> None:
    if out.exists() and any(out.iterdir()):
        old = out.with_name(f".{out.name}.replaced")
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
        partial.rename(out)
        shutil.rmtree(old)
    else:
        partial.rename(out)
    sync_folder(out.parent)
