"""`plan --recommend`: what it names fits, loads as training loads it, and says why; what does not fit is explained."""

from __future__ import annotations

from pathlib import Path

import pytest

from qwen_edit_zero.commands.plan import plan
from qwen_edit_zero.errors import UserError
from qwen_edit_zero.planning.advice.recommend import recommend
from qwen_edit_zero.planning.advice.search import MARGIN
from qwen_edit_zero.planning.advice.written import write_options
from qwen_edit_zero.planning.hardware.clusters import parse_gpus
from qwen_edit_zero.planning.jobs.job import make_job
from qwen_edit_zero.planning.jobs.wish import Shape, Wish
from qwen_edit_zero.planning.plan import Plan
from qwen_edit_zero.settings.load import load_settings

RECIPES = Path(__file__).parents[2] / "recipes"


def wish(gpus: str, recipe: str = "full_finetune", *overrides: str, engine: str | None = None) -> Wish:
    return Wish(RECIPES / f"{recipe}.yaml", overrides, engine, None, parse_gpus(gpus), Shape(references=1))


@pytest.mark.parametrize(
    ("gpus", "recipe"),
    [("8xA100-80", "full_finetune"), ("8xA100-40", "full_finetune"), ("8x8xH100-SXM", "full_finetune"),
     ("8xA100-40", "lora"), ("8x8xA100-80", "lora"), ("8xA100-80", "freeze_modulation")],
)  # fmt: skip
def test_what_is_recommended_fits_and_is_taken_by_training(gpus: str, recipe: str, tmp_path: Path) -> None:
    asked = wish(gpus, recipe)
    found = recommend(asked)
    rates = [option.samples_per_second for option in found.best]
    assert rates == sorted(rates, reverse=True)
    for option, (written, ds) in zip(found.best, write_options(list(found.best), asked, tmp_path), strict=True):
        world = asked.gpus.world
        loaded = load_settings(written, ds=ds, world_size=world)
        assert loaded.settings == option.loaded.settings
        job = make_job(
            loaded.settings, cluster_world=world, gpus_per_node=asked.gpus.gpus_per_node, sample=asked.sample
        )
        again = Plan(job, asked.gpus)
        assert again.memory.peak == option.plan.memory.peak
        assert again.memory.peak[1] <= (1 - MARGIN) * asked.gpus.accelerator.memory
        assert again.host_peak[1] <= asked.gpus.host_memory
        assert job.kind != "zero3" or loaded.settings.model.activation_checkpointing != "selective"
        assert "# - " in written.read_text(encoding="utf-8"), "says why"


def test_each_engine_is_named_once_or_has_a_reason_why_not() -> None:
    found = recommend(wish("8xA100-80"))
    said = [option.family.name for option in found.best] + [line.split(":")[0] for line in found.others]
    for name in ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP2"):
        assert said.count(name) == 1, said
    (ddp,) = [line for line in found.others if line.startswith("DDP:")]
    assert "GiB at its peak" in ddp
    assert "more of these GPUs do not help" in ddp


def test_what_the_user_said_stays() -> None:
    found = recommend(wish("8xA100-80", "full_finetune", "model.activation_checkpointing=block", engine="fsdp2"))
    for option in found.best:
        assert option.loaded.settings.engine.backend == "fsdp2"
        assert option.loaded.settings.model.activation_checkpointing == "block"
        assert option.loaded.settings.model.checkpoint_every == 1


def test_gpus_share_samples_where_the_batch_is_too_small() -> None:
    found = recommend(wish("8x8xH100-SXM", "lora"))  # 16 samples for 64 GPUs
    assert {option.loaded.settings.engine.sequence_parallel for option in found.best} == {4}


def test_where_nothing_fits_the_least_that_would_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError) as error:
        plan([str(RECIPES / "full_finetune.yaml"), "--recommend", "--gpus", "1xRTX-4090"])
    text = str(error.value)
    assert text.startswith("nothing fits on 1xRTX-4090")
    assert "the least of these GPUs that would do: " in text
    assert error.value.exit_status == 2
    needed = int(text.partition("of these GPUs that would do: ")[2].partition(",")[0])
    recommend(wish(f"{needed}xRTX-4090", "full_finetune", f"batch.global_size={max(64, needed)}"))
