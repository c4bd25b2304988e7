"""From a checkpoint to a model folder that diffusers loads, as a stream with bounded memory. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qwen_edit_zero.checkpoints.base_model import BaseModel, OpenModel
from qwen_edit_zero.checkpoints.components import Components, add_components, bytes_to_copy, plan_components
from qwen_edit_zero.checkpoints.consolidation_folder import OutFolder, claim, write_json
from qwen_edit_zero.checkpoints.consolidation_foreign import plan_foreign
from qwen_edit_zero.checkpoints.consolidation_journal import Journal, identity_of
from qwen_edit_zero.checkpoints.consolidation_output import WEIGHTS, OutputTensor, index_of, lay_out
from qwen_edit_zero.checkpoints.consolidation_plan import FilesOfThreads, Sources, plan_tensors
from qwen_edit_zero.checkpoints.consolidation_writer import Progress, default_threads, write_files
from qwen_edit_zero.checkpoints.foreign.recognise import is_foreign, open_foreign
from qwen_edit_zero.checkpoints.foreign.source import ForeignSource
from qwen_edit_zero.checkpoints.manifest import ModelReference
from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.checkpoints.validity import find_checkpoint
from qwen_edit_zero.errors import CheckpointError, ModelFolderError
from qwen_edit_zero.flat_state import EMA, PARAM

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

    Everything read is compared with its checksum. Of our own checkpoints, frozen parameters come from the base model,
    unless the checkpoint has them, and adapters are merged. DeepSpeed and DCP folders are recognised by what is in
    them; they have no base model of their own: without `base_model`, their weights alone are written.

    Args:
        source: a checkpoint folder, or a run (or its `checkpoints` folder): then its newest valid checkpoint; or a
            DeepSpeed folder (or a folder of its tags), or a DCP folder.
        out: folder to make; must not exist or be empty, and no other call may be making it. If an earlier call was
            interrupted, this one goes on from what is there in `.NAME.partial` beside it.
        dtype: of the floating-point weights written; others keep theirs.
        open_model: opens a model folder by path, or `tiny`.
        base_model: where the model trained from is now; None: where it was then.
        weights: `ema` for the running average, if the run kept one.
        fill: take parameters that a DeepSpeed or DCP folder lacks from the base model.
        shard_bytes: the most a weight file holds, unless a single tensor is larger.
        components: how VAE, text encoder, tokenizer, ... come along; see `plan_components`.
        overwrite: replace `out` if it was written by this function before.
        threads: that read, convert and write, at least 1; None: one a processor, up to four.
        progress: told the bytes written so far and in all, from any thread.
        say: told which checkpoint was chosen, how names were resolved, what was left out.

    Returns `out`. Raises CheckpointError or ModelFolderError before anything is written if checkpoint and model are not
    whole or do not belong together; CheckpointError if damage or a value too large for `dtype` is met on the way;
    StorageError if writing fails.
    """
    assert threads is None or threads > 0, threads
    options = _Options(dtype, shard_bytes, components, threads or default_threads(), progress or _silent)
    if is_foreign(source):
        if weights != "model":
            raise CheckpointError(
                f"{source} is of another program, whose averaged weights are not known; leave out --weights"
            )
        return _consolidate_foreign(source, out, open_model, base_model, fill, overwrite, options, say)
    checkpoint = choose_checkpoint(source, say)
    with claim(out, checkpoint, overwrite=overwrite, say=say) as folder, CheckpointReader(checkpoint) as reader:
        manifest = reader.manifest
        base = _open_base(manifest.model, base_model, components, open_model)
        if (trained_from := base.path if base else manifest.model.folder) is not None:
            folder.spare(trained_from)
        sources = Sources(reader)
        kind = EMA if weights == "ema" else PARAM
        try:
            job = _Job(
                source=f"{manifest.save_id} {kind} {manifest.model.fingerprint}",
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
            _write_folder(job, folder, options)
        finally:
            sources.close()
    return out


def _open_base(
    model: ModelReference, base_model: Path | None, components: Components, open_model: OpenModel
) -> BaseModel | None:
    """The model trained from; None if nothing of it is needed."""
    if model.all_stored and base_model is None and components == "none":
        return None
    try:
        return open_model(str(base_model) if base_model else model.path)
    except ModelFolderError as error:
        if not model.all_stored:
            raise
        hint = "The checkpoint has all weights of the transformer: with --components none they are written alone"
        raise ModelFolderError(f"{error}. {hint}") from None


def choose_checkpoint(source: Path, say: Callable[[str], None]) -> Path:
    """The checkpoint meant by a path (see `find_checkpoint`); those passed over and the one taken are told."""
    found = find_checkpoint(source)
    assert found.path is not None
    for path, reason in found.passed_over:
        say(f"passing over {path.name}: {reason}")
    if found.path != source:
        say(f"using {found.path}, the newest valid checkpoint")
    return found.path


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
    files = FilesOfThreads()
    try:
        with claim(out, state.path, overwrite=overwrite, say=say) as folder, ForeignSource(state) as opened:
            base = open_model(str(base_model)) if base_model else None
            if base is not None:
                folder.spare(base.path)
            stats = [(p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in state.files]
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
            _write_folder(job, folder, options)
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
    """What to write: the transformer of a model folder if there is a `config`, else weights alone.

    `source` identifies it; `finish` compares checksums at the end.
    """

    source: str
    tensors: Sequence[OutputTensor]
    base: BaseModel | None
    config: Mapping[str, Any] | None
    provenance: Mapping[str, object]
    finish: Callable[[], None] = lambda: None


def _silent(done: int, total: int) -> None:
    pass


def _write_folder(job: _Job, folder: OutFolder, options: _Options) -> None:
    weights = folder.partial if job.config is None else folder.partial / "transformer"
    files = lay_out(job.tensors, options.shard_bytes)
    identity = identity_of(job.source, files)
    brought = plan_components(job.base.path, folder.path.parent, options.components) if job.base else []
    goes_on = Journal.is_of(weights, identity)
    there = sum(p.stat().st_blocks * 512 for p in weights.glob(f"{WEIGHTS}*")) if goes_on else 0
    need = max(0, sum(f.size for f in files) - there) + bytes_to_copy(brought)
    folder.make_room(weights if goes_on else None, need)
    with folder.writing():
        weights.mkdir(parents=True, exist_ok=True)
        with closing(Journal(weights, identity)) as journal:
            write_files(weights, files, journal, threads=options.threads, progress=options.progress)
            job.finish()
        folder.keep_after_failure = True
        if len(files) > 1:
            write_json(weights / f"{WEIGHTS}.safetensors.index.json", index_of(files))
        if job.config is not None:
            write_json(weights / "config.json", {"_class_name": "QwenImageTransformer2DModel", **job.config})
            add_components(brought, folder.partial)
        folder.finish({**job.provenance, "dtype": options.dtype}, journal.path)
