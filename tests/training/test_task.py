"""A micro-batch of several samples is the same as its samples alone: losses, gradients, and what is counted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from qwen_edit_zero.edit_data.batches.batch import EditBatch, collate
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.training.task import EditTask
from tests.edit_data.made_entries import MadeEntry
from tests.edit_model.small import SCHEDULER, TRANSFORMER, random_transformer

LENGTHS, DRAWS, IDS = (9, 23, 17, 23), (0, 0, 1, 0), ("a", "b", "a", "c")  # "a" comes twice


def entries() -> list[MadeEntry]:
    """Samples of two references with prompts of several lengths; every other one has a mask."""
    made = []
    for number, length in enumerate(LENGTHS):
        generator = torch.Generator().manual_seed(number)

        def randn(*shape: int, generator: torch.Generator = generator) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        mask = torch.randint(0, 256, (6, 8), dtype=torch.uint8, generator=generator) if number % 2 else None
        made.append(MadeEntry(randn(16, 6, 8), (randn(16, 4, 6), randn(16, 10, 4)), randn(length, 32), mask))
    return made


def batches(size: int) -> list[EditBatch]:
    made, parts = entries(), [slice(i, i + size) for i in range(0, len(LENGTHS), size)]
    return [
        collate(made[p], weights=[1.0 + i for i in range(4)][p], sample_ids=IDS[p], epoch=1, draws=DRAWS[p])
        for p in parts
    ]


def task(**data: Any) -> EditTask:
    settings = Settings.model_validate({"run": {"max_steps": 1}, "data": data})
    folder: Any = SimpleNamespace(scheduler_config=SCHEDULER, transformer_config=TRANSFORMER)
    return EditTask(folder, settings)


def trained(module: torch.nn.Module, task: EditTask, size: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Losses of all samples, and the gradient of their weighted sum."""
    losses = []
    for batch in batches(size):
        losses.append(task.losses(module, batch))
        (losses[-1] * batch.weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return torch.cat(losses).detach(), gradients


@pytest.mark.parametrize("mask_weight", [1.0, 5.0])
@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_padded_batch_is_its_samples_alone(size: int, mask_weight: float) -> None:
    module, of_run = random_transformer(), task(mask_weight=mask_weight)
    losses, gradients = trained(module, of_run, size)
    alone, expected = trained(module, of_run, 1)
    assert torch.allclose(losses, alone, rtol=2e-6, atol=0)
    assert gradients.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(gradients[name], value, rtol=1e-3, atol=1e-5 * value.abs().max().item()), name


def test_the_mask_weighs_on_samples_that_have_one_only() -> None:
    module = random_transformer()
    plain, _ = trained(module, task(), 4)
    masked, _ = trained(module, task(mask_weight=5.0), 4)
    assert torch.equal(plain[[0, 2]], masked[[0, 2]])
    assert ((plain - masked)[[1, 3]].abs() > 1e-4).all()


def test_a_sample_that_comes_again_has_another_loss() -> None:
    made = entries()
    same = [made[0], made[0]]
    batch = collate(same, weights=[1, 1], sample_ids=["a", "a"], epoch=0, draws=[0, 1])
    losses = task().losses(random_transformer(), batch)
    assert losses[0] != losses[1]


def test_a_filler_counts_no_arithmetic() -> None:
    made, of_run = entries()[:1], task()
    real = collate(made, weights=[0.5], sample_ids=["a"], epoch=0)
    filler = collate(made, weights=[0.0], sample_ids=["a"], epoch=0, filler=True)
    assert of_run.flops(real) > 0
    assert of_run.flops(filler) == 0
