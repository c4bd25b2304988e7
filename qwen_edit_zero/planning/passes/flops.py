"""How much arithmetic a sample and a step cost: FLOP, 2 a multiply-add, of matrix products and attention.

Counted on the same run of the model as its memory (`trace.py`): each linear layer costs 2 x rows x inputs x outputs, as
much again for the gradient of its input and of its weight, where they are needed; attention 4 S^2 d, and 8 S^2 d for
its gradients. With width d, L blocks and S = image + text tokens a forward is 24 d^2 S L + 4 S^2 d L + small terms.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qwen_edit_zero.planning.autograd.computing import Computing
from qwen_edit_zero.planning.autograd.trace import trace
from qwen_edit_zero.planning.jobs.job import Job
from qwen_edit_zero.planning.jobs.model import TransformerShape
from qwen_edit_zero.planning.jobs.tokens import SampleShape
from qwen_edit_zero.planning.jobs.trainable import split
from qwen_edit_zero.planning.passes.activations import trace_of
from qwen_edit_zero.settings.models import ModelSettings


@dataclass(frozen=True)
class Flops:
    """Of an optimizer step, all ranks together.

    Attributes:
        useful: forward and backward pass.
        recomputed: blocks computed again, and attention's scores in the backward pass of its kernel.
    """

    useful: int
    recomputed: int

    @property
    def all(self) -> int:
        """What the GPUs do."""
        return self.useful + self.recomputed


def step_flops(job: Job) -> Flops:
    """Of an optimizer step, all ranks together; every micro-batch is of the job's samples."""
    found = trace_of(job)
    ranks = job.accumulation * job.data_ranks * job.sequence
    useful = found.forward_flops + found.backward_flops - found.scores_again
    return Flops(ranks * useful, ranks * (found.recomputed_flops + found.scores_again))


def attention_flops(job: Job) -> Flops:
    """What of `step_flops` is attention's two products."""
    found, model = trace_of(job), job.settings.model
    ranks = job.accumulation * job.data_ranks * job.sequence
    each = 4 * job.micro * job.sample.tokens**2 * job.model.width // job.sequence  # a block's, forward
    again = 0
    if model.activation_checkpointing == "block":
        again = -(-job.model.blocks // model.checkpoint_every)
    scores = found.scores_again  # half of `each` for each block that gradients go through, in a kernel
    backward = 4 * scores if scores else 2 * job.model.blocks * each
    return Flops(ranks * (job.model.blocks * each + backward), ranks * (again * each + scores))


def forward_flops(model: TransformerShape, sample: SampleShape) -> int:
    """Of one sample's forward pass."""
    costs = _costs(model, ModelSettings(), "none")
    return _at(costs[0], sample.image_tokens, sample.text_tokens)


def training_flops(
    config: Mapping[str, Any],
    *,
    image_tokens: int,
    text_tokens: int,
    checkpointing: bool,
    adapters_only: bool = False,
    settings: ModelSettings | None = None,
) -> int:
    """FLOP of forward and backward of one sample, and of the recomputation of its blocks.

    Attention's scores, which its kernel computes again in the backward pass, count once.

    Args:
        config: the transformer's configuration.
        image_tokens: target and references together.
        text_tokens: length of the prompt embedding.
        checkpointing: whether each block is recomputed in the backward.
        adapters_only: only adapters train, of the smallest rank; without `settings`.
        settings: what trains, by `freeze` and `lora`; nothing else of it counts.
    """
    if settings is None:
        settings = ModelSettings.model_validate({"lora": {"rank": 1} if adapters_only else None})
    costs = _costs(TransformerShape.from_config(config), _trains(settings), "block" if checkpointing else "none")
    return sum(_at(cost, image_tokens, text_tokens) for cost in costs)


def _trains(settings: ModelSettings) -> ModelSettings:
    return ModelSettings(freeze=settings.freeze, lora=settings.lora)


_Cost = tuple[int, int, int, int]  # FLOP of a sample, of an image token, of a text token, of a pair of tokens


@functools.lru_cache(maxsize=64)
def _costs(model: TransformerShape, settings: ModelSettings, checkpointing: str) -> tuple[_Cost, _Cost, _Cost]:
    """Of forward, recomputation and backward. They are polynomials of the tokens, so four samples tell all others."""
    trained = frozenset(p.name for p in split(model, settings)[0])
    adapted = None
    if settings.lora is not None:
        names = (name for name in trained if ".lora_" in name)
        adapted = settings.lora.rank, frozenset(name.split(".lora_")[0] for name in names)
    how = Computing(checkpointing="block" if checkpointing == "block" else "none")

    def run(image: int, text: int) -> tuple[int, int, int]:
        found = trace(model, SampleShape((1, image), (), text), how, trained=trained, adapted=adapted)
        return found.forward_flops, found.recomputed_flops, found.backward_flops - found.scores_again

    both, more_image, more_text, twice = run(1, 1), run(2, 1), run(1, 2), run(3, 1)
    costs = []
    for one, image, text, three in zip(both, more_image, more_text, twice, strict=True):
        # With S = 2, 3, 3, 4: a sample + image i + text t + pair S^2.
        pair = (three - 2 * image + one) // 2
        of_image, of_text = image - one - 5 * pair, text - one - 5 * pair
        costs.append((one - of_image - of_text - 4 * pair, of_image, of_text, pair))
    return costs[0], costs[1], costs[2]


def _at(cost: _Cost, image: int, text: int) -> int:
    return cost[0] + cost[1] * image + cost[2] * text + cost[3] * (image + text) ** 2
