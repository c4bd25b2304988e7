"""What all engine benchmarks train: the real transformer class in a size of their choice, seeded weights and data."""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from qwen_edit_zero.edit_data.batches.batch import EditBatch
from qwen_edit_zero.edit_model.folder import ModelFolder, open_model_folder
from qwen_edit_zero.edit_model.transformer import build_transformer
from qwen_edit_zero.engines.base import ParallelEngine
from qwen_edit_zero.engines.factory import make_engine
from qwen_edit_zero.flat_state import PARAM
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.training.task import EditTask

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
LATENT = 16  # a side of the target's and the reference's latents; 64 tokens each
TEXT = 16  # prompt tokens
PERSISTENT = 2_000  # elements below which ZeRO-3 keeps a parameter gathered: biases and norms
BUCKET = 200_000  # elements, in place of the shipped 200 M: the benchmark's blocks are as much smaller


def transformer_config(*, width: int, layers: int, head_dim: int = 32) -> dict[str, Any]:
    """Configuration of a transformer with about 36 `width`^2 parameters a block."""
    shares = {32: [8, 12, 12], 64: [16, 24, 24], 128: [16, 56, 56]}
    return {
        "_class_name": "QwenImageTransformer2DModel",
        "attention_head_dim": head_dim,
        "axes_dims_rope": shares[head_dim],
        "guidance_embeds": False,
        "in_channels": 64,
        "joint_attention_dim": 192,
        "num_attention_heads": width // head_dim,
        "num_layers": layers,
        "out_channels": 16,
        "patch_size": 2,
    }


def model_folder(config: dict[str, Any]) -> ModelFolder:
    """The tiny model's folder, said to have this transformer; for what reads configurations only."""
    return dataclasses.replace(open_model_folder("tiny"), transformer_config=config)


class SeededWeights:
    """TensorSource of normal values, a function of each tensor's name. Biases are zero, norms one."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}

    def names(self, kind: str = PARAM) -> Iterable[str]:
        """Names of all parameters."""
        return self._shapes

    def shape(self, name: str, kind: str = PARAM) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self._shapes[name]

    def read(self, name: str, start: int, length: int, kind: str = PARAM) -> torch.Tensor:
        """Elements `start .. start + length` of the flattened parameter."""
        return self.whole(name).flatten()[start : start + length].clone()

    def whole(self, name: str) -> torch.Tensor:
        """The parameter."""
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        # Values that bf16 holds exactly: engines that start from bf16 and from fp32 weights then start equal.
        return torch.randn(shape, generator=generator).mul_(0.5 / math.sqrt(shape[1])).bfloat16().float()


def deepspeed_config(name: str, *, bucket: int = BUCKET, **zero: Any) -> dict[str, Any]:
    """A shipped JSON (`zero2` ...) without its "auto"s, with smaller buckets; `zero` adds to `zero_optimization`."""
    shipped = json.loads((ROOT / "ds_configs" / f"{name}.json").read_text(encoding="utf-8"))

    def without_auto(values: dict[str, Any]) -> dict[str, Any]:
        return {k: without_auto(v) if isinstance(v, dict) else v for k, v in values.items() if v != "auto"}

    config = without_auto(shipped)
    section = config["zero_optimization"]
    sizes = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
    section |= {key: bucket for key in sizes if key in section}
    if section["stage"] == 3:
        section["stage3_param_persistence_threshold"] = PERSISTENT
    section |= zero
    return config


def settings(
    kind: str,
    *,
    precision: str = "bf16",
    checkpointing: str = "none",
    bucket: int = BUCKET,
    ema: float | None = None,
    **zero: Any,
) -> Settings:
    """Settings for "ddp", "fsdp2", "fsdp2-hybrid" (groups of 2 ranks), "zero1", "zero2" or "zero3".

    `zero` adds to the JSON's `zero_optimization`.
    """
    engine: dict[str, Any] = {}
    if kind.startswith("zero"):
        engine |= {"backend": "deepspeed", "deepspeed": deepspeed_config(kind, bucket=bucket, **zero)}
    else:
        engine["backend"] = kind.split("-")[0]
        if kind == "fsdp2-hybrid":
            engine["shard_size"] = 2
    return Settings.model_validate(
        {
            "run": {"max_steps": 1},
            "model": {"activation_checkpointing": checkpointing},
            "precision": precision,
            "optimizer": {"ema": ema},
            "engine": engine,
        }
    )


def build(folder: ModelFolder, run: Settings) -> ParallelEngine:
    """An engine of this run, set up with seeded weights, as training does it."""
    engine = make_engine(run, device=CPU)
    with engine.init_context():
        module = build_transformer(folder)
    engine.setup(module, optimizer=run.optimizer, weights=SeededWeights(module))
    return engine


def batches(step: int, rank: int, count: int, size: int = 1) -> list[EditBatch]:
    """A rank's micro-batches of a step, with one reference each."""
    made = []
    for micro in range(count):
        generator = torch.Generator().manual_seed(10_000 * step + 100 * rank + micro)
        latents = [torch.randn(size, 16, LATENT, LATENT, generator=generator) for _ in range(2)]
        made.append(
            EditBatch(
                target_latents=latents[0],
                reference_latents=(latents[1],),
                prompt_embeds=torch.randn(size, TEXT, 192, generator=generator),
                prompt_mask=None,
                weights=torch.ones(size),
                sample_ids=tuple(f"{rank}-{micro}-{i}" for i in range(size)),
                epoch=step,
            )
        )
    return made


def run_backward(engine: ParallelEngine, task: EditTask, batch: EditBatch, *, is_last: bool) -> None:
    """Forward and backward of one micro-batch, the sum of its losses; nothing of it stays alive but gradients."""
    with engine.micro_step(is_last=is_last):
        engine.backward(task.losses(engine.forward, batch).sum())


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Numbers of parameters of a model, and of its tensors.

    Attributes:
        without_gradient: those of the last block's text branch, which feeds nothing.
        persistent: those that ZeRO-3 always keeps gathered.
        gathered_once: those that ZeRO-3 need not gather again for backward: `without_gradient` and the last layer.
    """

    whole: int
    blocks: int
    root: int
    without_gradient: int
    persistent: int
    gathered_once: int
    tensors: int


def sizes(config: dict[str, Any]) -> Sizes:
    """Count the parameters."""
    with torch.device("meta"):
        module = build_transformer(model_folder(config))
    counts = {name: parameter.numel() for name, parameter in module.named_parameters()}
    blocks = sum(count for name, count in counts.items() if name.startswith("transformer_blocks."))
    last = f"transformer_blocks.{config['num_layers'] - 1}."
    dead = (f"{last}attn.to_add_out.", f"{last}txt_mlp.")
    large = {name: count for name, count in counts.items() if count >= PERSISTENT}
    return Sizes(
        whole=sum(counts.values()),
        blocks=blocks,
        root=sum(counts.values()) - blocks,
        without_gradient=sum(count for name, count in counts.items() if name.startswith(dead)),
        persistent=sum(counts.values()) - sum(large.values()),
        gathered_once=sum(count for name, count in large.items() if name.startswith((*dead, "proj_out."))),
        tensors=len(counts),
    )
