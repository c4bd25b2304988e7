"""A small training problem: the real transformer class with odd parameters around it, and a plain loop that solves it.

The plain loop knows no engine. It states the arithmetic that every engine must reproduce, with one convention beyond
`torch.optim.AdamW`: a parameter without gradient has a zero gradient.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel

from qwen_edit_zero.engines.base import ParallelEngine
from qwen_edit_zero.flat_state import PARAM, FlatRange
from qwen_edit_zero.settings.models import OptimizerSettings, Settings

GLOBAL_BATCH = 12
STEPS = 4
GRID = [(1, 2, 4), (1, 2, 2)]  # target and one reference, in packed tokens
TEXT, CHANNELS, TEXT_WIDTH = 3, 8, 12


class OddModel(torch.nn.Module):
    """The transformer between two tied layers, with a 0-d gain and a parameter that nothing uses.

    The last block's text branch gets no gradient either, as in the full-size model.
    """

    _repeated_blocks = QwenImageTransformer2DModel._repeated_blocks

    def __init__(self, *, frozen: bool, layers: int = 2) -> None:
        super().__init__()
        self.transformer = QwenImageTransformer2DModel(
            in_channels=CHANNELS, out_channels=CHANNELS // 4, num_layers=layers, attention_head_dim=8,
            num_attention_heads=2, joint_attention_dim=TEXT_WIDTH, axes_dims_rope=(2, 2, 4),
        )  # fmt: skip
        self.before = torch.nn.Linear(CHANNELS, CHANNELS)
        self.after = torch.nn.Linear(CHANNELS, CHANNELS, bias=False)
        self.after.weight = self.before.weight
        self.gain = torch.nn.Parameter(torch.tensor(0.7))
        self.unused = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        if frozen:
            for name, parameter in self.named_parameters():
                parameter.requires_grad = not (".img_mod." in name or name.endswith("img_in.weight"))

    def forward(self, hidden_states: torch.Tensor, **inputs: Any) -> torch.Tensor:
        hidden = self.transformer(hidden_states=self.before(hidden_states), return_dict=False, **inputs)[0]
        return self.after(hidden) * self.gain


def make_model(*, frozen: bool = False, layers: int = 2) -> OddModel:
    torch.manual_seed(7)
    return OddModel(frozen=frozen, layers=layers)


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def samples(step: int, count: int = GLOBAL_BATCH) -> list[dict[str, torch.Tensor]]:
    """The samples of a step: tensors without a batch dimension. Their losses spread over more than a decade."""
    drawn = []
    for index in range(count):
        generator = torch.Generator().manual_seed(1000 * step + index)
        tokens = sum(math.prod(grid) for grid in GRID)
        drawn.append(
            {
                "hidden_states": torch.randn(tokens, CHANNELS, generator=generator),
                "encoder_hidden_states": torch.randn(TEXT, TEXT_WIDTH, generator=generator),
                "timestep": torch.rand((), generator=generator),
                "target": torch.randn(math.prod(GRID[0]), CHANNELS, generator=generator) * (1 + index / 4),
            }
        )
    return drawn


def loss_sum(forward: Any, batch: Sequence[dict[str, torch.Tensor]], weight: float = 1.0) -> torch.Tensor:
    """Sum over the batch of each sample's mean square error, in fp32."""
    stacked = {key: torch.stack([sample[key] for sample in batch]) for key in batch[0]}
    target = stacked.pop("target")
    output = forward(**stacked, img_shapes=[GRID] * len(batch))[:, : target.shape[1]]
    return (output.float() - target).square().mean(dim=(1, 2)).sum() * weight


def train_plainly(
    model: torch.nn.Module, optimizer: OptimizerSettings, *, steps: int = STEPS, autocast: torch.dtype | None = None,
    counts: Sequence[int] | None = None,
) -> tuple[list[float], list[float]]:  # fmt: skip
    """Train `model` in place, one sample at a time, on one process. Returns losses and gradient norms."""
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(
        trained, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay
    )
    losses, norms = [], []
    for step in range(steps):
        batch = samples(step, counts[step] if counts else GLOBAL_BATCH)
        total = 0.0
        for sample in batch:
            with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
                loss = loss_sum(model, [sample]) / len(batch)
            loss.backward()
            total += loss.item()
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.clip_grad_norm_(trained, optimizer.clip_norm or math.inf)
        adamw.param_groups[0]["lr"] = lr_at(step, optimizer)
        adamw.step()
        adamw.zero_grad()
        losses.append(total)
        norms.append(norm.item())
    return losses, norms


def lr_at(step: int, optimizer: OptimizerSettings) -> float:
    return optimizer.lr * (1 + step) / 2


def train_with(
    engine: ParallelEngine, optimizer: OptimizerSettings, *, micro: int, first_step: int = 0, steps: int = STEPS,
    counts: Sequence[int] | None = None, poison: tuple[int, int] | None = None,
) -> tuple[list[float], list[float], list[bool]]:  # fmt: skip
    """Train with an engine. Ranks that have fewer micro-batches than another run fillers of weight 0.

    `poison` = (step, rank): that rank's loss in that step becomes NaN.
    Returns this rank's share of losses (their sum over ranks is the loss), global norms, and whether steps applied.
    """
    losses, norms, applied = [], [], []
    for step in range(first_step, first_step + steps):
        drawn = samples(step, counts[step] if counts else GLOBAL_BATCH)
        own = drawn[engine.dp_rank :: engine.dp_size]
        micro_batches = [(own[i : i + micro], 1.0) for i in range(0, len(own), micro)]
        needed = -(-(-(-len(drawn) // engine.dp_size)) // micro)
        micro_batches += [(drawn[:1], 0.0)] * (needed - len(micro_batches))
        total = 0.0
        for i, (batch, weight) in enumerate(micro_batches):
            with engine.micro_step(is_last=i == len(micro_batches) - 1):
                loss = loss_sum(engine.forward, batch, weight) / len(drawn)
                total += loss.item()
                if poison == (step, engine.dp_rank):
                    loss = loss * math.nan
                engine.backward(loss)
        result = engine.step(lr=lr_at(step, optimizer))
        losses.append(total)
        norms.append(result.grad_norm)
        applied.append(result.applied)
    return losses, norms, applied


class MemorySource:
    """A TensorSource over whole tensors in memory that counts the elements read."""

    def __init__(self, tensors: dict[str, dict[str, torch.Tensor]]) -> None:
        self.tensors = tensors
        self.elements_read = 0

    @classmethod
    def of_weights(cls, weights: dict[str, torch.Tensor]) -> MemorySource:
        return cls({PARAM: weights})

    @classmethod
    def of_ranges(cls, ranges: Iterable[FlatRange]) -> MemorySource:
        """Assemble ranges of all ranks; asserts that they cover every element exactly once."""
        whole: dict[str, dict[str, torch.Tensor]] = {}
        covered: dict[tuple[str, str], torch.Tensor] = {}
        for r in ranges:
            tensor = whole.setdefault(r.kind, {}).setdefault(r.name, torch.full(r.shape, math.nan)).view(-1)
            seen = covered.setdefault((r.kind, r.name), torch.zeros(tensor.numel(), dtype=torch.int))
            end = r.start + r.values.numel()
            tensor[r.start : end] = r.values
            seen[r.start : end] += 1
        for key, seen in covered.items():
            assert bool((seen == 1).all()), f"{key} is not covered exactly once"
        return cls(whole)

    def names(self, kind: str = PARAM) -> Iterable[str]:
        return self.tensors.get(kind, {}).keys()

    def shape(self, name: str, kind: str = PARAM) -> tuple[int, ...]:
        return tuple(self.tensors[kind][name].shape)

    def read(self, name: str, start: int, length: int, kind: str = PARAM) -> torch.Tensor:
        flat = self.tensors[kind][name].view(-1)
        assert 0 <= start <= start + length <= flat.numel()
        self.elements_read += length
        return flat[start : start + length].clone()


def engine_settings(kind: str, *, precision: str = "fp32", checkpointing: str = "block", **engine: Any) -> Settings:
    """Settings for "ddp", "fsdp2", "fsdp2-hybrid" (groups of 2) or "zero1".."zero3"; small buckets, so several are used."""
    options: dict[str, Any] = dict(engine)
    if kind.startswith("zero"):
        stage = int(kind[4])
        options["backend"] = "deepspeed"
        options["deepspeed"] = {
            "train_batch_size": GLOBAL_BATCH,
            "zero_optimization": {
                "stage": stage, "reduce_bucket_size": 2000, "allgather_bucket_size": 2000, "overlap_comm": False,
            } | ({"stage3_param_persistence_threshold": 100, "sub_group_size": 3000} if stage == 3 else {}),
        }  # fmt: skip
        if "offload" in kind:
            options["deepspeed"]["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
    else:
        options["backend"] = kind.split("-")[0]
        if kind == "fsdp2-hybrid":
            options["shard_size"] = 2
    return Settings.model_validate(
        {"precision": precision, "model": {"activation_checkpointing": checkpointing}, "engine": options,
         "run": {"max_steps": 1}}
    )  # fmt: skip


def relative(found: float, expected: float) -> float:
    return abs(found - expected) / abs(expected)


def largest_deviation(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest over all tensors of |found - expected| / |expected| in the L2 norm."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - expected[name]).norm() / expected[name].norm().clamp_min(1e-6)) for name in expected
    )


def packed(value: Any) -> bytes:
    """What a rank returns: tensors would travel as shared memory that ends with the rank."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpacked(value: bytes) -> Any:
    return torch.load(io.BytesIO(value), weights_only=False)


def everything(ranges: Iterator[FlatRange]) -> list[FlatRange]:
    return [FlatRange(r.name, r.kind, r.shape, r.start, r.values.detach().cpu().clone()) for r in ranges]
