"""A small training problem: the real transformer class with odd parameters around it, and a plain loop that solves it.

The plain loop knows no engine. It states the arithmetic that every engine must reproduce, with one convention beyond
`torch.optim.AdamW`: a parameter without gradient has a zero gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel

from qwen_edit_zero.engines.base import ParallelEngine, StepResult
from qwen_edit_zero.settings.models import OptimizerSettings

OPTIMIZER = OptimizerSettings(lr=1e-2, weight_decay=0.1, clip_norm=0.5)  # some steps are clipped, some are not
# Samples of each step; 5 is the short last batch of an epoch.
COUNTS = (12, 5, *[12] * 10, 5, *[12] * 7)
POISONED_STEP = 2  # not applied, for a non-finite loss on one rank
ALL_STEPS = range(len(COUNTS))
GRID = [(1, 2, 4), (1, 2, 2)]  # target and one reference, in packed tokens
TEXT, CHANNELS, TEXT_WIDTH = 3, 8, 12


class OddModel(torch.nn.Module):
    """The transformer between two tied layers, with a 0-d gain and a parameter that nothing uses.

    The last block's text branch gets no gradient either, as in the full-size model.
    """

    _repeated_blocks = QwenImageTransformer2DModel._repeated_blocks

    def __init__(self, *, frozen: bool, layers: int = 2, heads: int = 2) -> None:
        super().__init__()
        self.transformer = QwenImageTransformer2DModel(
            in_channels=CHANNELS, out_channels=CHANNELS // 4, num_layers=layers, attention_head_dim=8,
            num_attention_heads=heads, joint_attention_dim=TEXT_WIDTH, axes_dims_rope=(2, 2, 4),
        )  # fmt: skip
        self.before = torch.nn.Linear(CHANNELS, CHANNELS)
        self.after = torch.nn.Linear(CHANNELS, CHANNELS, bias=False)
        self.after.weight = self.before.weight
        self.gain = torch.nn.Parameter(torch.tensor(0.7))
        self.unused = torch.nn.Parameter(torch.linspace(-1, 1, 7))
        if frozen:
            for name, parameter in self.named_parameters():
                parameter.requires_grad = not (".img_mod." in name or name.endswith("img_in.weight"))

    def forward(self, hidden_states: torch.Tensor, shortcut: bool = False, **inputs: Any) -> torch.Tensor:
        if shortcut:  # leaves the transformer out
            return self.after(self.before(hidden_states)) * self.gain
        hidden = self.transformer(hidden_states=self.before(hidden_states), return_dict=False, **inputs)[0]
        return (self.after(hidden) * self.gain).view(hidden.shape)  # a view, as the transformer's own output is


def make_model(*, frozen: bool = False, layers: int = 2, heads: int = 2) -> OddModel:
    torch.manual_seed(7)
    return OddModel(frozen=frozen, layers=layers, heads=heads)


def make_engine_model(engine: ParallelEngine, *, frozen: bool = False, layers: int = 2) -> OddModel:
    """The same model as in training: constructed inside the engine's context, with real non-parameter tensors."""
    with engine.init_context():
        model = OddModel(frozen=frozen, layers=layers)
    rope = make_model(layers=1).transformer.pos_embed
    model.transformer.pos_embed.pos_freqs, model.transformer.pos_embed.neg_freqs = rope.pos_freqs, rope.neg_freqs
    return model


def weights_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in module.named_parameters()}


def samples(step: int, count: int, device: torch.device | str = "cpu") -> list[dict[str, torch.Tensor]]:
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
    return [{key: tensor.to(device) for key, tensor in sample.items()} for sample in drawn]


def loss_sum(
    forward: Any, batch: Sequence[dict[str, torch.Tensor]], weight: float = 1.0, **options: Any
) -> torch.Tensor:
    """Sum over the batch of each sample's mean square error, in fp32."""
    stacked = {key: torch.stack([sample[key] for sample in batch]) for key in batch[0]}
    target = stacked.pop("target")
    output = forward(**stacked, img_shapes=[GRID] * len(batch), **options)[:, : target.shape[1]]
    return (output.float() - target).square().mean(dim=(1, 2)).sum() * weight


def train_plainly(
    model: torch.nn.Module,
    optimizer: OptimizerSettings,
    *,
    autocast: torch.dtype | None = None,
    steps: range = ALL_STEPS,
    average: dict[str, torch.Tensor] | None = None,
    adamw: torch.optim.AdamW | None = None,
) -> tuple[list[float], list[float]]:
    """Train `model` in place through the schedule, one sample at a time. Returns losses and gradient norms.

    `average`, with copies of the trained weights, becomes their running average. `adamw` may have a past.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = adamw or torch.optim.AdamW(
        trained, lr=optimizer.lr, betas=optimizer.betas, eps=optimizer.eps, weight_decay=optimizer.weight_decay
    )
    device = trained[0].device
    losses, norms, applied = [], [], 0
    for step in steps:
        count = COUNTS[step]
        batch = samples(step, count, device)
        total = 0.0
        for sample in batch:
            with torch.autocast(device.type, autocast or torch.bfloat16, enabled=autocast is not None):
                loss = loss_sum(model, [sample]) / count
            loss.backward()
            total += loss.item()
        for parameter in trained:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        norm = torch.nn.utils.clip_grad_norm_(trained, optimizer.clip_norm or math.inf)
        adamw.param_groups[0]["lr"] = lr_at(step)
        if step != POISONED_STEP:
            adamw.step()
            if average is not None and optimizer.ema is not None:
                warm = (1 + applied) / (10 + applied) if optimizer.ema_warmup else 1.0
                decay = min(optimizer.ema, warm)
                for name, weight in weights_of(model).items():
                    if name in average:
                        average[name] = decay * average[name] + (1 - decay) * weight
            applied += 1
        adamw.zero_grad()
        losses.append(total)
        norms.append(norm.item())
    return losses, norms


def lr_at(step: int) -> float:
    return OPTIMIZER.lr * (1 + step % 5) / 2


def train_with(
    engine: ParallelEngine, *, micro: int, steps: range = ALL_STEPS, poisoned_rank: int | None = None
) -> tuple[list[float], list[StepResult]]:
    """Train with an engine. Ranks that have fewer micro-batches than another run fillers of weight 0.

    In the poisoned step `poisoned_rank`'s loss becomes NaN. Returns this rank's share of the losses (the sum over
    ranks is the loss of the step) and the results of the steps.
    """
    losses, results = [], []
    for step in steps:
        drawn = samples(step, COUNTS[step], engine.device)
        own = drawn[engine.dp_rank :: engine.dp_size]
        micro_batches = [(own[i : i + micro], 1.0) for i in range(0, len(own), micro)]
        most = -(-len(drawn) // engine.dp_size)  # samples of the ranks that have most
        micro_batches += [(drawn[:1], 0.0)] * (-(-most // micro) - len(micro_batches))
        total = 0.0
        for i, (batch, weight) in enumerate(micro_batches):
            with engine.micro_step(is_last=i == len(micro_batches) - 1):
                loss = loss_sum(engine.forward, batch, weight) / len(drawn)
                total += loss.item()
                if step == POISONED_STEP and poisoned_rank == engine.dp_rank:
                    loss = loss * math.nan
                engine.backward(loss)
        losses.append(total)
        results.append(engine.step(lr=lr_at(step)))
    return losses, results


def relative(found: float, expected: float) -> float:
    return abs(found - expected) / abs(expected)


def largest_deviation(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """Largest over all tensors of |found - expected| / |expected| in the L2 norm."""
    assert found.keys() == expected.keys()
    return max(
        float((found[name] - expected[name]).norm() / expected[name].norm().clamp_min(1e-6)) for name in expected
    )
