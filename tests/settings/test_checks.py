"""Settings that contradict each other, the ranks or the device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from qwen_edit_zero.settings.render import settings_yaml
from tests.settings.loading import load, message


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["schedule.warmup_steps=10"],
            "schedule.warmup_steps 10 (override) is not less than run.max_steps 10 (r.yaml:2)",
        ),
        (["batch.micro_size=16"], "batch.micro_size 16 (override) is more than batch.global_size 8 (default)"),
        (["batch.micro_size=3"], "batch.global_size 8 (default) is no multiple of batch.micro_size 3"),
        (["schedule.final_fraction=0.1"], "schedule.final_fraction 0.1 (override) has no effect"),
        (["model.lora.rank=8", "model.freeze=[proj_out]"], "frozen anyway"),
        (["model.lora.targets=[]"], "leaves nothing to train"),
        (['model.freeze=["*"]'], "freezes every parameter"),
        (["flow.sigma_distribution=uniform", "flow.logit_std=2.0"], "flow.logit_std 2.0 (override) has no effect"),
        (["flow.mode_scale=1.0"], "flow.mode_scale 1.0 (override) has no effect"),
        (["precision.min_loss_scale=2"], "has no loss scale"),
        (["precision=fp16", "precision.min_loss_scale=1e9"], "is more than precision.initial_loss_scale"),
        (["precision=fp16", "precision.initial_loss_scale=1000", "engine.backend=deepspeed"], "power of two"),
        (["engine.backend=ddp", "engine.shard_size=2"], "engine.shard_size 2 (override) has no effect"),
        (["engine.backend=deepspeed", "engine.reshard_after_forward=false"], "has no such option"),
        (["engine.backend=ddp", "engine.cpu_offload=true"], "engine.cpu_offload true (override) is for FSDP2"),
        (["engine.backend=deepspeed", "engine.cpu_offload=true"], "ds_configs/zero2_offload.json"),
        (["engine.pin_memory=false"], "engine.pin_memory false (override) has no effect"),
        (["engine.backend=deepspeed", "optimizer.kind=adamw_8bit"], "flat masters"),
        (["engine.cpu_offload=true", "optimizer.kind=adamw_8bit"], "use one of the two"),
        (["engine.deepspeed={train_batch_size: 8}"], "is no DeepSpeed; remove one of them"),
        (["data.manifest=a.jsonl", "sampling.every=5"], "sampling.every 5 (override) asks for pictures"),
        (["data.manifest=a.jsonl", "sampling.count=3"], "sampling.count 3 (override) asks for pictures"),
        (["sampling.weights=ema"], 'sampling.weights "ema" (override) asks for pictures of averaged weights, but'),
        (
            ["data.manifest=a.jsonl", "validation.every=5"],
            "validation.every 5 (override) asks for the loss on held-out",
        ),
        (["validation.weights=ema", "validation.every=5"], "asks for the held-out loss of averaged weights, but"),
        (["validation.samples=5"], "validation.samples 5 (override) has no effect"),
        (
            ["checkpoint.keep_best=1", "checkpoint.best_metric=validation"],
            "needs a held-out loss, but validation.every",
        ),
        (
            [
                "checkpoint.keep_best=1",
                "checkpoint.best_metric=validation",
                "checkpoint.every=50",
                "validation.every=20",
            ],
            "checkpoint.every 50 (override) is no multiple of validation.every 20 (override)",
        ),
        (["optimizer.ema_warmup=true"], "optimizer.ema_warmup true (override) has no effect"),
        (["optimizer.ema=1"], "optimizer.ema"),
        (["checkpoint.frozen=full"], 'checkpoint.frozen "full" (override) has no effect: no parameter is frozen'),
        (["flow.shift=-1"], "flow.shift"),
    ],
)
def test_contradictions_are_found_with_both_places(tmp_path: Path, overrides: list[str], words: str) -> None:
    assert words in message(tmp_path, overrides=overrides)


@pytest.mark.parametrize("override", ["model.lora.rank=8", "model.freeze=[proj_out.*]"])
def test_frozen_parameters_on_nvme_are_refused_before_anything_is_built(tmp_path: Path, override: str) -> None:
    zero: dict[str, Any] = {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local"}}
    ds = {"train_batch_size": "auto", "zero_optimization": zero}
    text = message(tmp_path, ds=ds, overrides=[override])
    assert override.split("=")[0].removesuffix(".rank") in text
    assert "offload_param.device is nvme (d.json" in text
    load(tmp_path, ds=ds)
    zero["offload_param"] = {"device": "cpu"}
    load(tmp_path, ds=ds, overrides=[override])


def test_several_contradictions_are_listed_together(tmp_path: Path) -> None:
    text = message(tmp_path, overrides=["batch.micro_size=16", "schedule.warmup_steps=99"])
    assert text.startswith("settings: 2 things are wrong")


@pytest.mark.parametrize(
    "overrides",
    [
        ["checkpoint.every=1000"],
        ["data.manifest=a.jsonl"],
        ["data.manifest=a.jsonl", "sampling.count=0"],
        ["data.manifest=a.jsonl", "data.validation=b.jsonl", "sampling.every=2", "sampling.count=3"],
        ["data.manifest=a.jsonl", "data.validation_split=test", "sampling.count=3", "validation.every=5"],
        ["checkpoint.keep_best=1", "checkpoint.best_metric=validation", "checkpoint.every=60", "validation.every=20"],
        ["checkpoint.keep_best=1", "checkpoint.best_metric=validation", "checkpoint.every=null", "validation.every=20"],
        ["precision=fp16", "precision.initial_loss_scale=1000"],
        ["run.max_steps=null", "run.epochs=1", "schedule.warmup_steps=1000"],
    ],
)
def test_what_only_looks_odd_is_accepted(tmp_path: Path, overrides: list[str]) -> None:
    loaded = load(tmp_path, overrides=overrides)
    assert load(tmp_path, settings_yaml(loaded)).settings == loaded.settings


def test_shards_must_divide_the_ranks(tmp_path: Path) -> None:
    load(tmp_path, overrides=["engine.shard_size=2"], world_size=4)
    text = message(tmp_path, overrides=["engine.shard_size=3"], world_size=4)
    assert "engine.shard_size 3 (override) does not divide 4 ranks; sizes that do: 1, 2, 4" in text
    assert "engine.shard_size" in message(tmp_path, overrides=["engine.shard_size=8"], world_size=4)
