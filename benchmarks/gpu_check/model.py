"""The models that are measured, with random weights made where they are needed, and a sample for them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.engines.problem import model_folder, transformer_config
from benchmarks.gpu_check.expected import step_bytes
from qwen_edit_zero.edit_data.batches.batch import EditBatch
from qwen_edit_zero.edit_model.folder import ModelFolder
from qwen_edit_zero.edit_model.transformer import build_transformer
from qwen_edit_zero.engines.base import ParallelEngine
from qwen_edit_zero.engines.blocks import repeated_blocks
from qwen_edit_zero.engines.factory import make_engine
from qwen_edit_zero.flat_state import PARAM
from qwen_edit_zero.planning.jobs.known import RELEASED
from qwen_edit_zero.settings.models import LoraSettings, Settings

_PAGE = 1 << 22  # elements drawn by one generator


@dataclass(frozen=True)
class Subject:
    """What is trained: a configuration, adapters of this rank, and a sample of this size.

    Attributes:
        pixels: side of the target and of the one reference.
        prompt_tokens: instruction and what the text encoder makes of the reference.
    """

    config: dict[str, Any]
    rank: int
    pixels: int
    prompt_tokens: int

    @property
    def folder(self) -> ModelFolder:
        """A model folder that has this configuration, for what reads configurations only."""
        return model_folder(self.config)

    @property
    def width(self) -> int:
        """Elements of a token inside the model."""
        return int(self.config["num_attention_heads"]) * int(self.config["attention_head_dim"])

    @property
    def tokens(self) -> int:
        """Of the target, the reference and the prompt together."""
        return 2 * (self.pixels // 16) ** 2 + self.prompt_tokens


# A 384x384 reference is 196 tokens to the text encoder.
FULL = Subject(dict(RELEASED["Qwen-Image-Edit-2509"]), rank=32, pixels=1024, prompt_tokens=256)
TINY = Subject(transformer_config(width=64, layers=2), rank=4, pixels=128, prompt_tokens=16)


class RandomWeights:
    """TensorSource of normal values in bf16, drawn on a device page by page: nothing is ever stored or copied.

    A value depends on the tensor's name and the place in it alone, so engines that cut tensors differently start from
    the same model. Biases and the adapters' second factors are zero, norms one.
    """

    def __init__(self, module: torch.nn.Module, device: torch.device) -> None:
        self._shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        self._device = device

    def names(self, kind: str = PARAM) -> Iterable[str]:
        """Names of all parameters."""
        return self._shapes if kind == PARAM else ()

    def shape(self, name: str, kind: str = PARAM) -> tuple[int, ...]:
        """Shape of the whole parameter."""
        return self._shapes[name]

    def read(self, name: str, start: int, length: int, kind: str = PARAM) -> torch.Tensor:
        """Elements `start .. start + length` of the flattened parameter, on the device."""
        shape = self._shapes[name]
        if len(shape) < 2 or ".lora_B." in name:
            value = 0.0 if name.endswith("bias") or ".lora_B." in name else 1.0
            return torch.full((length,), value, dtype=torch.bfloat16, device=self._device)
        whole = torch.empty(length, dtype=torch.bfloat16, device=self._device)
        end, deviation = start + length, 0.5 / math.sqrt(shape[1])
        for page in range(start // _PAGE, -(-end // _PAGE)):
            generator = torch.Generator(self._device).manual_seed(zlib.crc32(f"{name} {page}".encode()))
            size = min(_PAGE, math.prod(shape) - page * _PAGE)
            drawn = torch.randn(size, generator=generator, dtype=torch.bfloat16, device=self._device)
            low, high = max(start, page * _PAGE), min(end, page * _PAGE + size)
            whole[low - start : high - start] = drawn[low - page * _PAGE : high - page * _PAGE]
        return whole.mul_(deviation)


def settings(subject: Subject, kind: str, *, device: torch.device, compiled: bool = False) -> Settings:
    """LoRA in bf16 with each block recomputed, under "ddp" or "fsdp2"."""
    return Settings.model_validate(
        {
            "run": {"max_steps": 1},
            "model": {"activation_checkpointing": "block", "compile": compiled, "lora": {"rank": subject.rank}},
            "precision": "bf16",
            "engine": {"backend": kind, "device": device.type},
        }
    )


def build(subject: Subject, run: Settings, device: torch.device) -> ParallelEngine:
    """An engine of this run, set up with random weights as training does it."""
    engine = make_engine(run, device=device)
    with engine.init_context():
        module = build_transformer(subject.folder, lora=run.model.lora)
    engine.setup(module, optimizer=run.optimizer, weights=RandomWeights(module, device))
    return engine


def sample(subject: Subject, device: torch.device) -> EditBatch:
    """A micro-batch of one sample, seeded."""
    generator = torch.Generator().manual_seed(0)
    side = subject.pixels // 8
    target, reference = (torch.randn(1, 16, side, side, generator=generator) for _ in range(2))
    prompt = torch.randn(1, subject.prompt_tokens, int(subject.config["joint_attention_dim"]), generator=generator)
    batch = EditBatch(target, (reference,), prompt, None, torch.ones(1), ("sample",), 0)
    return batch.to(device)


def step_memory(subject: Subject, kind: str) -> float:
    """What `expected.step_bytes` says for one rank; builds no model."""
    with torch.device("meta"):
        module = build_transformer(subject.folder, lora=LoraSettings(rank=subject.rank))
    everything = sum(p.numel() for p in module.parameters())
    trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
    blocks = [sum(p.numel() for p in block.parameters()) for block in repeated_blocks(module)]
    return step_bytes(
        kind,
        trained=trained,
        frozen=everything - trained,
        ranks=1,
        blocks=len(blocks),
        tokens=subject.tokens,
        width=subject.width,
        largest_block=max(blocks),
        outside_blocks=everything - sum(blocks),
    )
