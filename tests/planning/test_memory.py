"""Plans of full-size runs: jobs from settings, memory by phase, traffic over links."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.planning.engines.communication import traffic
from qwen_edit_zero.planning.engines.kinds import Kind, Phase, page_locked, total
from qwen_edit_zero.planning.engines.memory import memory, saved_bytes
from qwen_edit_zero.planning.engines.state import state
from qwen_edit_zero.planning.hardware.clusters import parse_gpus
from qwen_edit_zero.planning.jobs.deepspeed import ZeroOptions
from qwen_edit_zero.planning.jobs.job import Job, make_job
from qwen_edit_zero.settings.models import Settings

N = 20_430_401_088
DS_CONFIGS = Path(__file__).parents[2] / "ds_configs"
A100 = parse_gpus("8xA100-80").accelerator


def plan(kind: str, world: int, **sections: Any) -> Job:
    options = dict(sections.pop("engine", {}))
    if kind.startswith("zero"):
        options |= {"backend": "deepspeed", "deepspeed": json.loads((DS_CONFIGS / f"{kind}.json").read_text())}
    else:
        options |= {"backend": kind}
    settings = Settings.model_validate(
        {"run": {"max_steps": 1}, "model": {"path": "Qwen-Image-Edit-2509"}, "batch": {"global_size": world}}
        | {"engine": options}
        | sections
    )
    return make_job(settings, cluster_world=world, gpus_per_node=8)


@pytest.mark.parametrize(
    ("engine", "world", "bytes_an_element"),
    [
        ("ddp", 8, 16),
        ("zero1", 8, 2 + 12 / 8),
        ("zero2", 64, 2 + 12 / 64),
        ("zero3", 64, 18 / 64),
        ("fsdp2", 64, 12 / 64),
    ],
)
def test_state_of_the_full_model_is_that_of_the_formulas(engine: str, world: int, bytes_an_element: float) -> None:
    held = dict(state(plan(engine, world)).device)
    held.pop(Kind.BUCKETS, None)
    held.pop(Kind.GATHERED, None)
    assert total(held) == pytest.approx(bytes_an_element * N, rel=1e-3)


def test_offloading_moves_state_to_page_locked_host_memory() -> None:
    job = plan("fsdp2", 8, engine={"cpu_offload": True})
    held = state(job)
    assert not held.device
    weight = 4 * 6 * 3072 * 3072 // 8  # a rank's part of a modulation layer
    assert page_locked(weight) == 1 << 25
    assert 4 * N / 8 < held.host[Kind.MASTERS] < 8 * N / 8
    loose = state(plan("fsdp2", 8, engine={"cpu_offload": True, "pin_memory": False}))
    assert loose.host[Kind.MASTERS] == pytest.approx(4 * N / 8, rel=1e-3)
    zero = state(plan("zero2_offload", 8))
    assert zero.device[Kind.PARAMETERS] == pytest.approx(2 * N, rel=1e-6)
    assert zero.host[Kind.MASTERS] == page_locked(zero.host[Kind.MOMENTS] // 2)


def test_zero2_flattens_on_the_host_what_does_not_fit_twice_on_the_gpu() -> None:
    smaller = dataclasses.replace(A100, memory=70 << 30)
    anywhere, on_gpu = memory(plan("zero2", 64)), memory(plan("zero2", 64), smaller)
    assert anywhere.device[Phase.LOAD][Kind.PARAMETERS] == pytest.approx(4 * N, rel=1e-6)
    assert on_gpu.device[Phase.LOAD][Kind.PARAMETERS] == pytest.approx(2 * N, rel=1e-6)
    assert on_gpu.host[Phase.LOAD][Kind.PARAMETERS] == pytest.approx(4 * N, rel=1e-6)


def test_the_full_model_needs_sharding() -> None:
    assert not memory(plan("ddp", 8), A100).fits(A100)
    sharded = memory(plan("fsdp2", 8), A100)
    assert sharded.fits(A100)
    assert sharded.peak[0] is Phase.BACKWARD
    larger = memory(plan("fsdp2", 8, batch={"global_size": 32, "micro_size": 4}), A100)
    kinds = (Kind.ACTIVATIONS, Kind.INPUTS, Kind.FRAGMENTATION)
    for phase in (Phase.FORWARD, Phase.BACKWARD):
        for kind, size in larger.device[phase].items():
            assert size > sharded.device[phase][kind] if kind in kinds else size == sharded.device[phase][kind]


@pytest.mark.parametrize(
    ("engine", "sections", "groups", "exchanged"),
    [
        ("fsdp2", {}, 1, 0),
        ("zero3", {}, 1, 0),
        ("fsdp2", {"engine": {"shard_size": 8}}, 3, 0),
        ("fsdp2", {"engine": {"sequence_parallel": 8}}, 2, 3),
        ("fsdp2", {"engine": {"sequence_parallel": 2}}, 2, 3 / 7),
    ],
)
def test_each_group_of_ranks_has_buffers_of_nccl(
    engine: str, sections: dict[str, Any], groups: int, exchanged: float
) -> None:
    gib = 1 << 30
    held = memory(plan(engine, 64, **sections), A100).device
    assert {kinds[Kind.CONTEXT] for kinds in held.values()} == {gib // 2}
    assert held[Phase.BACKWARD][Kind.COMMUNICATORS] == pytest.approx((0.6 * groups + exchanged) * gib, rel=0.05)


def test_one_process_has_no_buffers_of_nccl() -> None:
    assert all(Kind.COMMUNICATORS not in kinds for kinds in memory(plan("fsdp2", 1), A100).device.values())


def test_a_rank_copies_its_share_of_a_checkpoint_to_the_host() -> None:
    for engine in ("ddp", "fsdp2", "zero3"):
        assert saved_bytes(plan(engine, 8)) == 12 * N // 8
    kept = memory(plan("fsdp2", 8))
    assert kept.host[Phase.FORWARD][Kind.SAVE] == kept.host[Phase.SAVE][Kind.SAVE]
    streamed = memory(plan("fsdp2", 8, checkpoint={"asynchronous": False}))
    assert Kind.SAVE not in streamed.host[Phase.SAVE]


def test_hybrid_sharding_keeps_gathering_inside_of_nodes() -> None:
    moved = traffic(plan("fsdp2", 64, engine={"shard_size": 8}))
    assert moved["all_gather", "shard"].between == moved["reduce_scatter", "shard"].between == 0
    reduced = moved["all_reduce", "replica"]
    assert reduced.within == 0
    assert reduced.between == pytest.approx(2 * 7 / 8 * 4 * N / 8, rel=5e-3)
    whole = traffic(plan("fsdp2", 64))["all_gather", "shard"]
    assert whole.payload == pytest.approx(4 * N, rel=1e-2)
    assert whole.between == pytest.approx(whole.payload * 63 / 64 / 8, rel=1e-6)
    assert not traffic(plan("ddp", 1))


def test_sequence_groups_exchange_tokens() -> None:
    job = plan("fsdp2", 8, engine={"sequence_parallel": 8}, batch={"global_size": 1})
    exchanged = traffic(job)["all_to_all", "sequence"]
    tokens = job.sample.tokens
    assert exchanged.payload == pytest.approx(3 * 60 * 4 * tokens * 3072 / 8 * 2, rel=1e-3)
    assert exchanged.between == 0


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"engine": {"shard_size": 3}}, "engine.shard_size is 3"),
        ({"engine": {"sequence_parallel": 16}}, "engine.sequence_parallel is 16"),
        ({"batch": {"global_size": 7}}, "does not divide over 8 ranks"),
    ],
)
def test_impossible_jobs_are_refused(sections: dict[str, Any], says: str) -> None:
    with pytest.raises(SettingsError, match=says):
        plan("fsdp2", 8, **sections)


def test_what_the_json_leaves_out_is_as_deepspeed_has_it() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for stage in (1, 2, 3):
        ours, theirs = (
            ZeroOptions.from_json({"zero_optimization": {"stage": stage}}, 8),
            DeepSpeedZeroConfig(stage=stage),
        )
        assert (ours.reduce_bucket, ours.allgather_bucket) == (theirs.reduce_bucket_size, theirs.allgather_bucket_size)
        assert (ours.prefetch_bucket, ours.sub_group) == (theirs.prefetch_bucket_size, theirs.sub_group_size)
        assert ours.persistence_threshold == theirs.param_persistence_threshold
        assert ours.model_persistence_threshold * 8 >= theirs.model_persistence_threshold
        assert (ours.max_live, ours.max_reuse_distance) == (theirs.max_live_parameters, theirs.max_reuse_distance)
        assert (ours.overlap, ours.contiguous_gradients) == (theirs.overlap_comm, theirs.contiguous_gradients)
        assert (ours.round_robin, ours.hpz) == (theirs.round_robin_gradients, theirs.zero_hpz_partition_size)
