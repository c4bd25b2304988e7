"""`plan --recommend`: what it names fits, loads as training loads it, and says why; what does not fit is explained."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest

from qwen_edit_zero.commands.plan import plan
from qwen_edit_zero.errors import UserError
from qwen_edit_zero.planning.advice.in_json import recommendation_json
from qwen_edit_zero.planning.advice.recommend import recommend
from qwen_edit_zero.planning.advice.search import Option, candidate
from qwen_edit_zero.planning.advice.written import write_options
from qwen_edit_zero.planning.hardware.clusters import parse_gpus
from qwen_edit_zero.planning.jobs.job import make_job
from qwen_edit_zero.planning.jobs.wish import Shape, Wish
from qwen_edit_zero.planning.plan import Plan, Verdict, spare
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
    rates = [option.samples_per_second for option in found.best if not option.is_for_room]
    assert all(after <= before / 0.99 for before, after in itertools.pairwise(rates)), (
        "the simpler of two like ones first"
    )
    assert any(option.is_roomy for option in found.best), "an option for those who do not trust the figures"
    for option, (written, ds) in zip(found.best, write_options(list(found.best), asked, tmp_path), strict=True):
        world = asked.gpus.world
        loaded = load_settings(written, ds=ds, world_size=world)
        assert loaded.settings == option.loaded.settings
        job = make_job(
            loaded.settings, cluster_world=world, gpus_per_node=asked.gpus.gpus_per_node, sample=asked.sample
        )
        again = Plan(job, asked.gpus)
        assert again.memory.peak == option.plan.memory.peak
        assert again.memory.peak[1] <= asked.gpus.accelerator.memory - spare(asked.gpus.accelerator.memory)
        assert again.verdict is Verdict.FITS
        assert again.host_needed[1] <= asked.gpus.host_memory
        assert loaded.settings.data.max_references == 1, "as it was planned for"
        assert job.kind != "zero3" or loaded.settings.model.activation_checkpointing != "selective"
        text = written.read_text(encoding="utf-8")
        assert "# - " in text, "says why"
        assert "# largest sample: target 1024x1024, references 1024x1024, 273 text tokens" in text


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


def test_a_larger_micro_batch_is_worth_its_memory() -> None:
    asked = wish("4x8xH100-SXM,net=3GB/s", "full_finetune", "model.activation_checkpointing=block")
    best = recommend(asked).best
    assert {option.loaded.settings.batch.micro_size for option in best} >= {2}, "fewer messages over a slow network"
    for option in best:
        micro = option.loaded.settings.batch.micro_size
        assert option.plan.timing is not None
        for smaller in (size for size in (1, 2, 4) if size < micro):
            split = option.loaded.settings.engine.sequence_parallel
            other = candidate(asked, option.family, split, smaller, option.recompute)
            assert isinstance(other, Option)
            assert other.plan.timing is not None
            for mine, others in zip(option.plan.timing.samples_per_s, other.plan.timing.samples_per_s, strict=True):
                assert mine >= 1.05 * others


def test_one_gpu_gets_the_simplest_engine() -> None:
    found = recommend(wish("1xH200", "lora"))
    assert {option.family.name for option in found.best} == {"DDP"}
    (line,) = [line for line in found.others if line.startswith("FSDP2, ZeRO-1")]
    assert "one GPU has nothing to share" in line
    only = recommend(wish("1xH200", "lora", engine="fsdp2"))
    assert only.best[0].family.name == "FSDP2", "where it is asked for"


@pytest.mark.parametrize("gpus", ["7xA100-80", "1x24xA100-80", "1000xA100-80"])
def test_a_batch_that_does_not_divide_is_told_once_with_sizes_that_do(gpus: str) -> None:
    with pytest.raises(UserError, match="does not divide over") as error:
        recommend(wish(gpus))
    assert str(error.value).count("does not divide") == 1
    assert "global sizes that fit: " in str(error.value)


def test_smaller_gpus_whose_nodes_lack_memory_are_not_named_as_enough() -> None:
    with pytest.raises(UserError) as error:
        recommend(wish("2xRTX-4090", engine="fsdp2"))
    text = str(error.value)
    named, _, family = text.partition("as many: ")[2].splitlines()[0].partition(", with ")
    found = recommend(wish(named, engine="fsdp2"))
    assert family in [option.family.name for option in found.best] + [line.split(":")[0] for line in found.others]
    (line,) = [line for line in text.splitlines() if line.startswith("  FSDP2 with offloading")]
    assert "of host memory a node at its peak" in line
    assert "if a node has more, say so: --gpus 2xRTX-4090,host=" in line
    enough = line.partition("--gpus ")[2].split(";")[0]
    assert "FSDP2 with offloading" in [option.family.name for option in recommend(wish(enough, engine="fsdp2")).best]


def test_json_is_what_the_text_says() -> None:
    asked = wish("1xH200", "lora")
    found = recommend(asked)
    said = json.loads(json.dumps(recommendation_json(asked, found)))
    assert [best["family"] for best in said["best"]] == [option.family.name for option in found.best]
    assert said["best"][0]["plan"]["peak"]["bytes"] == found.best[0].plan.memory.peak[1]
    assert said["sample"]["tokens"] == asked.sample.tokens


def test_files_that_are_there_stay_unless_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(RECIPES / "lora.yaml"), "--recommend", "--gpus", "1xH200", "--references", "1"]
    assert plan([*arguments, "--write", str(tmp_path)]) == 0
    before = sorted(tmp_path.iterdir())
    before[0].write_text("mine", encoding="utf-8")
    with pytest.raises(UserError, match=f"{before[0].name}.* already"):
        plan([*arguments, "--write", str(tmp_path)])
    assert before[0].read_text(encoding="utf-8") == "mine"
    assert plan([*arguments, "--write", str(tmp_path), "--force"]) == 0
    assert before[0].read_text(encoding="utf-8") != "mine"
    with pytest.raises(UserError, match="it is empty"):
        plan([*arguments, "--write", ""])
