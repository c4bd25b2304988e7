"""From a checkpoint of a LoRA run to a folder that holds only the adapter, for `pipeline.load_lora_weights`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from qwen_edit_zero.checkpoints.consolidate import Dtype, Weights, choose_checkpoint
from qwen_edit_zero.checkpoints.consolidation_folder import claim
from qwen_edit_zero.checkpoints.consolidation_plan import require_kind
from qwen_edit_zero.checkpoints.foreign.recognise import is_foreign
from qwen_edit_zero.checkpoints.manifest import LoraReference
from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.errors import CheckpointError
from qwen_edit_zero.flat_state import EMA, PARAM

if TYPE_CHECKING:
    import torch

SaveAdapter = Callable[[Path, "Iterable[tuple[str, torch.Tensor]]", LoraReference], object]


def export_adapter(
    source: Path,
    out: Path,
    *,
    save: SaveAdapter,
    option: str,
    dtype: Dtype = "fp32",
    weights: Weights = "model",
    overwrite: bool = False,
    say: Callable[[str], None] = print,
) -> Path:
    """Write the adapter of a LoRA run; the folder appears whole or not at all, under the rules of `consolidate`.

    Args:
        source: a checkpoint folder of ours, or a run: then its newest valid checkpoint.
        save: writes (parameter name, whole tensor) pairs into a folder.
        option: what the user typed to ask for an adapter, for messages.

    The other arguments, and what is raised, are as those of `consolidate`. Returns `out`.
    """
    if is_foreign(source):
        raise CheckpointError(
            f"{source} is of DeepSpeed or torch, which do not store the alpha of an adapter, so {option} cannot write "
            "one; save the adapter with the program that trained it"
        )
    checkpoint = choose_checkpoint(source, say)
    with claim(out, checkpoint, overwrite=overwrite, say=say) as folder, CheckpointReader(checkpoint) as reader:
        manifest, kind = reader.manifest, EMA if weights == "ema" else PARAM
        if manifest.model.lora is None:
            raise CheckpointError(f"{checkpoint} holds no adapter: its run had no model.lora. Leave out {option}")
        require_kind(reader, kind)
        if manifest.model.folder is not None:
            folder.spare(manifest.model.folder)
        folder.make_room(None, sum(4 * prod(reader.shape(name, kind)) for name in reader.names(kind)))
        with folder.writing():
            folder.partial.mkdir()
            save(folder.partial, _tensors(reader, kind, dtype), manifest.model.lora)
            folder.finish(
                {
                    "checkpoint": str(reader.path),
                    "save_id": manifest.save_id,
                    "step": manifest.step,
                    "samples_seen": manifest.samples_seen,
                    "weights": weights,
                    "adapter": manifest.model.lora.model_dump(mode="json"),
                    "base_model": manifest.model.path,
                    "base_model_fingerprint": manifest.model.fingerprint,
                    "dtype": dtype,
                }
            )
    return out


def _tensors(reader: CheckpointReader, kind: str, dtype: Dtype) -> Iterator[tuple[str, torch.Tensor]]:
    import torch

    target = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[dtype]
    for name in reader.names(kind):
        shape = reader.shape(name, kind)
        stored = reader.read(name, 0, prod(shape), kind).reshape(shape)
        tensor = stored.to(target)
        beyond = stored[torch.isfinite(stored) & ~torch.isfinite(tensor)]
        if beyond.numel():
            raise CheckpointError(
                f"{name} holds {float(beyond[0]):g}, which is beyond the range of {dtype}; use --dtype bf16 or fp32"
            )
        yield name, tensor
