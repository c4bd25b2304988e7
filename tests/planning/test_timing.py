from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.planning.costs.cost import cost, run_steps
from qwen_edit_zero.planning.costs.disk import checkpoint_bytes
from qwen_edit_zero.planning.costs.timing import Timing, timing
from qwen_edit_zero.planning.hardware.clusters import Cluster, parse_gpus
from qwen_edit_zero.planning.jobs.job import Job, make_job
from qwen_edit_zero.planning.jobs.tokens import SampleShape
from qwen_edit_zero.planning.passes.flops import step_flops
from qwen_edit_zero.settings.load import load_settings

MODEL = "model.path=Qwen-Image-Edit-2509"


def planned(gpus: str, *overrides: str, ds: str | None = None, area: int = 1024**2) -> tuple[Job, Cluster]:
    cluster = parse_gpus(gpus)
    said = [MODEL, *overrides]
    if not any(o.startswith("batch.global_size") for o in overrides):
        said.append(f"batch.global_size={cluster.world}")
    path = None if ds is None else Path(f"ds_configs/{ds}.json")
    loaded = load_settings(Path("recipes/full_finetune.yaml"), overrides=said, ds=path, world_size=cluster.world)
    sample = SampleShape.of(area, references=1)
    job = make_job(loaded.settings, cluster_world=cluster.world, gpus_per_node=cluster.gpus_per_node, sample=sample)
    return job, cluster


def of(gpus: str, *overrides: str, **options: Any) -> Timing:
    return timing(*planned(gpus, *overrides, **options))


def test_a_step_is_the_sum_of_its_parts() -> None:
    job, cluster = planned("8xH100")
    time = timing(job, cluster)
    for end in (0, 1):
        parts = (time.compute_s, time.exposed_s, time.optimizer_s, time.offload_s, time.save_s)
        assert time.step_s[end] == pytest.approx(sum(part[end] for part in parts))
        assert time.samples_per_s[end] == pytest.approx(8 / time.step_s[1 - end])
        useful = step_flops(job).useful / (8 * cluster.accelerator.bf16_flops)
        assert time.mfu[end] == pytest.approx(useful / time.step_s[1 - end])
    for name in ("compute_s", "exposed_s", "optimizer_s", "save_s", "step_s", "samples_per_s", "mfu", "encode_s"):
        low, high = getattr(time, name)
        assert 0 <= low < high, name
    assert 0.1 < time.mfu[0] < time.mfu[1] < 0.7


def test_communication_is_hidden_as_far_as_there_is_computing() -> None:
    fast, slow = of("8x8xA100-80"), of("8x8xA100-80,net=1GB/s")
    assert fast.exposed_s[0] == 0
    assert fast.exposed_s[1] == fast.communication_s[1]
    assert slow.exposed_s[0] == pytest.approx(slow.communication_s[0] - slow.compute_s[0])
    assert slow.step_s[0] > 3 * fast.step_s[0]


def test_what_nothing_runs_beside_is_never_hidden() -> None:
    zero2, zero3 = of("8xA100-80", ds="zero2"), of("8xA100-80", ds="zero3")
    assert zero2.exposed_s[0] > 0 == zero3.exposed_s[0]
    split = of("8xA100-80", "engine.sequence_parallel=8", "batch.global_size=1")
    assert split.exposed_s[0] > 0


def test_precision_and_compilation_change_the_rate() -> None:
    bf16, tf32, fp32, compiled = (
        of("8xH200", *said)
        for said in (
            (),
            ("precision.mode=fp32",),
            ("precision.mode=fp32", "precision.tf32=false"),
            ("model.compile=true",),
        )
    )
    assert bf16.compute_s[0] < tf32.compute_s[0] < fp32.compute_s[0]
    assert compiled.compute_s[0] < bf16.compute_s[0]
    assert fp32.mfu[1] < 1


def test_padded_prompts_cost_attention_its_flash_kernel() -> None:
    def computing(gpus: str, micro: int, *said: str) -> tuple[float, float]:
        return of(gpus, f"batch.micro_size={micro}", "batch.global_size=16", *said).compute_s

    one, two = computing("8xA100-80", 1), computing("8xA100-80", 2)
    assert two[0] > 1.1 * one[0]
    assert two[1] > 1.2 * one[1]
    job, cluster = planned("8xA100-80", "batch.micro_size=2", "batch.global_size=16")
    assert any("mask" in reason for reason in timing(job, cluster).why)
    alike = dataclasses.replace(job, padded=False)
    assert timing(alike, cluster).compute_s == pytest.approx(one)
    assert not any("mask" in reason for reason in timing(alike, cluster).why)
    # cuDNN's kernel takes a mask; in fp32 there is no flash kernel to lose
    assert computing("8xH100", 2)[0] == pytest.approx(computing("8xH100", 1)[0])
    fp32 = "precision.mode=fp32"
    assert computing("8xA100-80", 2, fp32) == pytest.approx(computing("8xA100-80", 1, fp32))


def test_attention_as_single_products_is_slower_than_a_kernel() -> None:
    kernel, products = of("8xA100-80"), of("8xA100-80", "model.attention=_native_math")
    assert products.compute_s[0] > 1.5 * kernel.compute_s[0]
    assert any("tokens x tokens" in reason for reason in products.why)


def test_a_backend_without_masks_is_refused_where_training_refuses_it() -> None:
    planned("8xH100", "model.attention=flash")
    with pytest.raises(SettingsError, match=r"model\.attention is flash, which takes no mask"):
        planned("8xH100", "model.attention=flash", "batch.micro_size=2", "batch.global_size=16")


def test_small_pictures_take_the_time_that_kernels_take_to_start() -> None:
    small = of("8xH100", area=128 * 128)
    assert any("starting kernels" in reason for reason in small.why)
    assert small.compute_s == of("8xH100", area=160 * 160).compute_s
    assert not any("starting kernels" in reason for reason in of("8xH100").why)


def test_offloading_takes_longer() -> None:
    plain = of("8xH100", "engine.backend=fsdp2")
    offloaded = of("8xH100", "engine.backend=fsdp2", "engine.cpu_offload=true")
    assert offloaded.optimizer_s[0] > 5 * plain.optimizer_s[1]
    kept = of("8xH100", "model.offload_activations=true")
    assert kept.offload_s[0] > 0 == plain.offload_s[1]


def test_disks_limit_reading_and_writing() -> None:
    job, cluster = planned("8xH100")
    slow, fast = timing(job, cluster, disk=1e8), timing(job, cluster, disk=1e10)
    assert fast.loader_limit == pytest.approx(100 * slow.loader_limit)
    assert slow.save_write_s[0] == pytest.approx(checkpoint_bytes(job) / 1e8)
    assert slow.save_stall_s == fast.save_stall_s
    starving = timing(*planned("8xB200", area=64 * 64), disk=1e6)
    assert any("the cache is read with" in reason for reason in starving.why)
    waits = timing(*planned("8xH100", "checkpoint.every=10"), disk=1e8)
    assert any("may not be written when the next is due" in reason for reason in waits.why)
    stopped = timing(*planned("8xH100", "checkpoint.asynchronous=false"))
    assert stopped.save_s[0] == pytest.approx(stopped.save_write_s[0] / 500)


@pytest.mark.parametrize(
    ("overrides", "samples", "steps"),
    [
        (("run.max_steps=200",), None, 200),
        (("run.max_steps=200", "run.epochs=1"), 800, 100),
        (("run.max_steps=200", "run.epochs=5"), 800, 200),
        (("run.max_steps=null", "run.epochs=2"), 801, 202),
        (("run.max_steps=null", "run.epochs=2"), None, None),
    ],
)
def test_a_run_is_as_long_as_its_settings_say(
    overrides: tuple[str, ...], samples: int | None, steps: int | None
) -> None:
    job, _ = planned("8xH100", *overrides)
    assert run_steps(job, samples) == steps


def test_cost_follows_from_the_time_of_a_step() -> None:
    job, cluster = planned("8xH100", "run.max_steps=10000")
    time, bill = timing(job, cluster), cost(job, cluster, samples=100_000, price=2.5)
    assert bill.encode_days is not None
    assert bill.days is not None
    assert bill.cache.total is not None
    assert bill.encode_days == pytest.approx([t * 100_000 / 86_400 for t in time.encode_s])
    assert bill.days == pytest.approx(
        [10_000 * t / 86_400 + e for t, e in zip(time.step_s, bill.encode_days, strict=True)]
    )
    assert bill.gpu_hours == pytest.approx([d * 24 * 8 for d in bill.days])
    assert bill.price == pytest.approx([2.5 * h for h in bill.gpu_hours])
    assert bill.checkpoints == 4
    assert bill.disk == 4 * bill.checkpoint + bill.cache.total


def test_what_is_not_known_is_not_made_up() -> None:
    job, cluster = planned("8xH100", "run.max_steps=null", "run.epochs=2")
    bill = cost(job, cluster, price=2.5)
    assert (bill.steps, bill.days, bill.gpu_hours, bill.price, bill.disk) == (None,) * 5
    assert bill.cache.sample > 0
    assert cost(*planned("8xH100")).price is None
