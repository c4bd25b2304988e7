"""From a checkpoint to a model folder that diffusers loads, as a stream with bounded memory. Imports no torch."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from qwen_edit_zero import __version__
from qwen_edit_zero.checkpoints.base_model import BaseModel, OpenModel
from qwen_edit_zero.checkpoints.components import Components, add_components
from qwen_edit_zero.checkpoints.consolidation_plan import OutputTensor, plan_tensors
from qwen_edit_zero.checkpoints.disk import ChecksummedFile, OpenFiles, bytes_text, sync_folder, write_file
from qwen_edit_zero.checkpoints.precision import OverflowingValue
from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.checkpoints.safetensors_file import build_header
from qwen_edit_zero.checkpoints.validity import find_checkpoint
from qwen_edit_zero.errors import CheckpointError, StorageError

WEIGHTS = "diffusion_pytorch_model"
PROVENANCE = "consolidated.json"
SHARD_BYTES = 10 * 10**9  # the default of diffusers
DTYPES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32"}

Dtype = Literal["bf16", "fp16", "fp32"]
Progress = Callable[[int, int], None]  # bytes written, bytes in all


def consolidate(
    source: Path,
    out: Path,
    *,
    dtype: Dtype,
    open_model: OpenModel,
    base_model: Path | None = None,
    shard_bytes: int = SHARD_BYTES,
    components: Components = "link",
    overwrite: bool = False,
    progress: Progress | None = None,
    say: Callable[[str], None] = print,
) -> Path:
    """Write the trained model in diffusers layout; the folder appears whole or not at all.

    Trained parameters are compared with their checksums while they are read. Frozen ones come from the base model,
    adapters are merged into it.

    Args:
        source: a checkpoint folder, or a run (or its `checkpoints` folder): then its newest valid checkpoint.
        out: folder to make; must not exist or be empty.
        dtype: of the floating-point weights written; others keep theirs.
        open_model: opens a model folder by path, or `tiny`.
        base_model: where the model trained from is now; None: where it was then.
        shard_bytes: the most a weight file holds, unless a single tensor is larger.
        components: how VAE, text encoder, tokenizer, ... come along; see `add_components`.
        overwrite: replace `out` if it was written by this function before.
        progress: told the bytes written so far and in all.
        say: told which checkpoint was chosen.

    Returns `out`. Raises CheckpointError or ModelFolderError before anything is written if checkpoint and model are not
    whole or do not belong together; CheckpointError if damage or a value too large for `dtype` is met on the way;
    StorageError if writing fails.
    """
    found = find_checkpoint(source)
    assert found.path is not None
    for path, reason in found.passed_over:
        say(f"passing over {path.name}: {reason}")
    if found.path != source:
        say(f"using {found.path}, the newest valid checkpoint")
    _refuse_out(out, found.path, overwrite)
    files = OpenFiles()
    try:
        with CheckpointReader(found.path) as reader:
            base = open_model(str(base_model) if base_model else reader.manifest.model.path)
            tensors = plan_tensors(reader, base, DTYPES[dtype], files)
            _write_folder(reader, base, tensors, out, dtype, shard_bytes, components, progress or _silent)
    finally:
        files.close()
    return out


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


def _write_folder(
    reader: CheckpointReader,
    base: BaseModel,
    tensors: list[OutputTensor],
    out: Path,
    dtype: str,
    shard_bytes: int,
    components: Components,
    progress: Progress,
) -> None:
    partial = out.with_name(f".{out.name}.partial")
    total = sum(t.size for t in tensors)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        free = shutil.disk_usage(out.parent).free
        if free < total:
            raise StorageError(f"the weights need {bytes_text(total)}, and {out.parent} has {bytes_text(free)} free")
        (partial / "transformer").mkdir(parents=True)
        config = {"_class_name": "QwenImageTransformer2DModel", **reader.manifest.model.config}
        _write_json(partial / "transformer" / "config.json", config)
        _write_shards(partial / "transformer", split_shards(tensors, shard_bytes), total, progress)
        add_components(base.path, partial, components)
        _write_json(partial / PROVENANCE, _provenance(reader, dtype))
        sync_folder(partial / "transformer")
        sync_folder(partial)
        _give_name(partial, out)
    except BaseException as error:
        shutil.rmtree(partial, ignore_errors=True)
        if isinstance(error, OSError):
            where = f" ({error.filename})" if error.filename else ""
            raise StorageError(
                f"writing {out} failed: {error.strerror or error}{where}; nothing is left of it"
            ) from error
        raise


def split_shards(tensors: list[OutputTensor], shard_bytes: int) -> list[list[OutputTensor]]:
    """Fill files in order, each up to `shard_bytes`; a larger tensor gets a file of its own."""
    shards: list[list[OutputTensor]] = [[]]
    room = shard_bytes
    for tensor in tensors:
        if shards[-1] and tensor.size > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(tensor)
        room -= tensor.size
    return shards


def _write_shards(folder: Path, shards: list[list[OutputTensor]], total: int, progress: Progress) -> None:
    count, done = len(shards), 0
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        name = f"{WEIGHTS}.safetensors" if count == 1 else f"{WEIGHTS}-{number:05d}-of-{count:05d}.safetensors"
        with ChecksummedFile(folder / name) as file:
            file.write(build_header([(t.name, t.dtype, t.shape) for t in shard], {"format": "pt"}))
            for tensor in shard:
                weight_map[tensor.name] = name
                before = file.size
                try:
                    for chunk in tensor.chunks():
                        file.write(chunk)
                        progress(done + file.size - before, total)
                except OverflowingValue as error:
                    raise CheckpointError(
                        f"{tensor.name} holds {error.value:g}, which is beyond the range of {tensor.dtype}; "
                        "use --dtype bf16 or fp32"
                    ) from None
                assert file.size - before == tensor.size, tensor.name
                done += tensor.size
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(folder / f"{WEIGHTS}.safetensors.index.json", index)


def _provenance(reader: CheckpointReader, dtype: str) -> dict[str, object]:
    manifest = reader.manifest
    return {
        "written_by": f"qwen-edit-zero {__version__}",
        "checkpoint": str(reader.path),
        "save_id": manifest.save_id,
        "step": manifest.step,
        "samples_seen": manifest.samples_seen,
        "dtype": dtype,
        "base_model": manifest.model.path,
        "base_model_fingerprint": manifest.model.fingerprint,
    }


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
