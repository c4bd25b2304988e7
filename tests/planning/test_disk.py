"""Sizes on disk are those of real shards and checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from qwen_edit_zero.edit_data.cache.entries import Entries
from qwen_edit_zero.edit_data.cache.ranks import Ranks
from qwen_edit_zero.edit_data.cache.store import entry_kind
from qwen_edit_zero.planning.costs.disk import cache_size, checkpoint_bytes, checkpoints_kept
from qwen_edit_zero.planning.jobs.job import Job, make_job
from qwen_edit_zero.planning.jobs.tokens import SampleShape
from qwen_edit_zero.settings.models import CheckpointSettings, LoraSettings, Settings

N = 20_430_401_088


def job_of(sample: SampleShape | None = None, **settings: Any) -> Job:
    settings = {"run": {"max_steps": 1}, "model": {"path": "Qwen-Image-Edit-2509"}} | settings
    return make_job(Settings(**settings), cluster_world=1, gpus_per_node=1, sample=sample)


@pytest.mark.parametrize(("area", "references", "samples"), [(256 * 256, 1, 40), (512 * 512, 3, 6)])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_cache_takes_what_its_shards_take(
    tmp_path: Path, area: int, references: int, samples: int, precision: str
) -> None:
    shape = SampleShape.of(area, aspect=4 / 3, references=references)
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    kept: list[Entries] = []
    for kind, tensors in (
        ("latent", [torch.zeros(16, 2 * rows, 2 * columns) for rows, columns in (shape.target, *shape.references)]),
        ("prompt", [torch.zeros(shape.text_tokens, 3584)]),
    ):
        entries = Entries(tmp_path, entry_kind(kind, {}))  # type: ignore[arg-type]
        with entries.writer() as writer:
            for number in range(samples * len(tensors)):
                writer.put(number.to_bytes(16, "big"), tensors[number % len(tensors)].to(dtype))
        entries.refresh(Ranks())
        kept.append(entries)
    on_disk = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    size = cache_size(job_of(shape, precision=precision), samples)
    assert size.total == pytest.approx(on_disk, rel=0.005)
    assert samples * size.sample == pytest.approx(on_disk, rel=0.03)  # headers weigh in so small a cache


def test_variants_and_dropped_captions_are_cached_too() -> None:
    shape = SampleShape.of(1024 * 1024, references=1)
    plain = cache_size(job_of(shape), 1000)
    assert plain.sample == 2 * 16 * 128 * 128 * 2 + shape.text_tokens * 3584 * 2
    assert plain.total is not None
    twice = cache_size(job_of(shape, data={"variants": 2, "augment": {"flip": True}}), 1000)
    assert twice.total == pytest.approx(2 * plain.total, rel=1e-3)
    dropped = cache_size(job_of(shape, data={"caption_dropout": 0.1}), 1000)
    assert dropped.sample == plain.sample + shape.text_tokens * 3584 * 2
    assert cache_size(job_of(shape)).total is None


def test_a_checkpoint_has_weights_and_moments_in_fp32() -> None:
    assert checkpoint_bytes(job_of()) == 12 * N
    assert checkpoint_bytes(job_of(optimizer={"ema": 0.999})) == 16 * N
    lora = {"path": "Qwen-Image-Edit-2509", "lora": LoraSettings(rank=32)}
    adapters = job_of(model=lora).trained_elements
    assert checkpoint_bytes(job_of(model=lora)) == 12 * adapters
    assert checkpoint_bytes(job_of(model=lora, checkpoint={"frozen": "full"})) == 12 * adapters + 2 * N


@pytest.mark.parametrize(
    ("settings", "steps", "kept"),
    [
        ({"every": 500, "keep": 3}, 10_000, 4),  # three, and the next while it is written
        ({"every": 500, "keep": 3}, 1_000, 2),
        ({"every": 500, "keep": None}, 10_100, 21),
        ({"every": None}, 10_000, 1),
        ({"every": 500, "keep": 2, "keep_every": 5000, "keep_best": 1}, 10_000, 6),
    ],
)
def test_as_many_checkpoints_lie_there_as_are_kept(settings: dict[str, Any], steps: int, kept: int) -> None:
    assert checkpoints_kept(CheckpointSettings(**settings), steps) == kept
