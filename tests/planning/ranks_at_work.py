"""Ranks that train a small transformer under given settings and tell what they hold and send."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import torch

from benchmarks.engines import problem
from benchmarks.engines.census import WireCensus
from qwen_edit_zero.edit_model.freezing import freeze
from qwen_edit_zero.edit_model.sequence_parallel import split_sequences
from qwen_edit_zero.edit_model.transformer import build_transformer
from qwen_edit_zero.engines.base import ParallelEngine
from qwen_edit_zero.engines.factory import make_engine
from qwen_edit_zero.planning.jobs.job import Job, make_job
from qwen_edit_zero.planning.jobs.tokens import SampleShape
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.training.task import EditTask

CONFIG = problem.transformer_config(width=64, layers=2, head_dim=32)
BUCKET = 30_000
ACCUMULATION = 2
_KINDS = {"alltoall": "all-to-all", **WireCensus._KINDS}
Case = tuple[str, dict[str, dict[str, Any]], dict[str, Any]]  # engine, other settings, DeepSpeed's ZeRO section


class Wire(WireCensus):
    """The benchmarks' census, with exchanges of sequence groups."""

    _KINDS = _KINDS


def settings_of(case: Case, world: int) -> Settings:
    """Settings of a case on CPUs, with two micro-batches of one sample."""
    kind, sections, zero = case
    values = problem.settings(kind, bucket=BUCKET, **zero).model_dump()
    for name, more in sections.items():
        values[name] = {**values[name], **more}
    values["engine"] |= {"device": "cpu"}
    shares = world // values["engine"]["sequence_parallel"]
    values["batch"] = {"global_size": ACCUMULATION * shares, "micro_size": 1}
    return Settings.model_validate(values)


def job_of(case: Case, world: int) -> Job:
    """The planner's job of a case: the samples of `problem.batches`."""
    side = problem.LATENT // 2
    sample = SampleShape((side, side), ((side, side),), problem.TEXT)
    return make_job(settings_of(case, world), cluster_world=world, gpus_per_node=world, sample=sample, config=CONFIG)


def build(run: Settings) -> ParallelEngine:
    """An engine of this run, set up."""
    engine = make_engine(run, device=problem.CPU)
    with engine.init_context():
        module = build_transformer(problem.model_folder(CONFIG), lora=run.model.lora)
    freeze(module, run.model.freeze)
    if engine.ranks.sequence_group is not None:
        split_sequences(module, engine.ranks.sequence_group)
    engine.setup(module, optimizer=run.optimizer, weights=problem.SeededWeights(module))
    return engine


def hold_and_send(rank: int, world: int, cases: list[Case]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """For each case: bytes held by kind between steps and of gradients before the step; payload by collective."""
    found = []
    for case in cases:
        run = settings_of(case, world)
        task = EditTask(problem.model_folder(CONFIG), run)
        engine = build(run)
        data = problem.batches(0, engine.ranks.dp_rank, ACCUMULATION)
        held: dict[str, int] = {}
        for _ in range(3):  # ZeRO-3 records its second pass, and prefetches in the third
            with Wire(small=world * 8) as wire:
                for number, batch in enumerate(data):
                    problem.run_backward(engine, task, batch, is_last=number == ACCUMULATION - 1)
                held = {"gradients": _held(engine).get("gradients", 0)}
                engine.step(lr=1e-4)
        held |= {kind: size for kind, size in _held(engine).items() if kind != "gradients"}
        wire.bytes.pop("small", None)
        found.append((held, dict(wire.bytes)))
        engine.close()
        del engine, task
        gc.collect()
    return found


def _held(engine: ParallelEngine) -> dict[str, int]:
    """Bytes by kind, each storage once."""
    seen: set[int] = set()
    sizes: Counter[str] = Counter()
    for kind, tensor in engine.held():
        assert isinstance(tensor, torch.Tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            sizes[kind] += storage.nbytes()
    return dict(sizes)
