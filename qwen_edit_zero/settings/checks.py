"""Mistakes that no single value shows: settings that contradict each other or have no effect.

A setting without effect is a mistake only if it differs from its default, so that resolved settings can be read again.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.settings.problems import shown_value


class _Report:
    def __init__(self, settings: Settings, sources: Mapping[str, str]) -> None:
        self.settings, self.sources = settings, sources
        self.lines: list[str] = []

    def at(self, name: str) -> str:
        """`batch.micro_size 4 (recipes/demo.yaml:9)`."""
        value: Any = self.settings
        for part in name.split("."):
            value = getattr(value, part)
        shown = value if not isinstance(value, BaseModel) else "given"
        shown = list(shown) if isinstance(shown, tuple) else shown
        source = self.sources.get(name) or next(
            (place for path, place in self.sources.items() if path.startswith(f"{name}.")), "default"
        )
        return f"{name} {shown if isinstance(value, BaseModel) else shown_value(shown)} ({source})"

    def add(self, line: str) -> None:
        self.lines.append(line)

    def no_effect(self, names: tuple[str, ...], why: str) -> None:
        """Report each of `names` that differs from its default."""
        for name in names:
            section, key = name.split(".")
            model = getattr(self.settings, section)
            if getattr(model, key) != type(model).model_fields[key].default:
                self.add(f"{self.at(name)} has no effect: {why}")


def cross_field_problems(settings: Settings, sources: Mapping[str, str]) -> list[str]:
    """One line for every contradiction between settings, naming the values and their places."""
    report = _Report(settings, sources)
    _batch_and_schedule(report)
    _model(report)
    _flow(report)
    _checkpoint(report)
    _precision(report)
    _engine(report)
    _average(report)
    _sampling(report)
    _validation(report)
    _instructions(report)
    _augmentation(report)
    return report.lines


def _batch_and_schedule(report: _Report) -> None:
    batch, run, schedule = report.settings.batch, report.settings.run, report.settings.schedule
    if batch.micro_size > batch.global_size:
        report.add(
            f"{report.at('batch.micro_size')} is more than {report.at('batch.global_size')}: one rank's forward cannot "
            "hold more samples than the optimizer step of all ranks"
        )
    elif batch.global_size % batch.micro_size:
        report.add(
            f"{report.at('batch.global_size')} is no multiple of {report.at('batch.micro_size')}, "
            "so it divides over no number of ranks"
        )
    if run.max_steps is not None and schedule.warmup_steps >= run.max_steps:
        report.add(
            f"{report.at('schedule.warmup_steps')} is not less than {report.at('run.max_steps')}: "
            "the learning rate would still be warming up when the run ends"
        )
    if schedule.kind == "constant":
        report.no_effect(("schedule.final_fraction",), f"{report.at('schedule.kind')} does not decay")


def _model(report: _Report) -> None:
    model = report.settings.model
    if model.lora is not None and model.freeze:
        report.add(
            f"{report.at('model.freeze')} goes with {report.at('model.lora')}: adapters train and everything else is "
            "frozen anyway; remove model.freeze, and choose with model.lora.targets what gets an adapter"
        )
    if model.lora is not None and not model.lora.targets:
        report.add(f"{report.at('model.lora.targets')} leaves nothing to train; name module endings such as attn.to_q")
    if "*" in model.freeze:
        report.add(f"{report.at('model.freeze')} freezes every parameter, so nothing would train")
    if model.activation_checkpointing == "none":
        why = f"{report.at('model.activation_checkpointing')} recomputes no block"
        report.no_effect(("model.checkpoint_every", "model.offload_activations"), why)
    if model.compile and model.activation_checkpointing == "selective" and report.settings.engine.sequence_parallel > 1:
        report.add(
            f"{report.at('model.compile')} has no effect with {report.at('model.activation_checkpointing')} and "
            f"{report.at('engine.sequence_parallel')}: the exchange between ranks inside of a recomputed block cannot "
            "be compiled. Use model.activation_checkpointing=block, or leave out one of the three"
        )


def _checkpoint(report: _Report) -> None:
    checkpoint = report.settings.checkpoint
    if checkpoint.keep is None:
        names = ("checkpoint.keep_every", "checkpoint.keep_best")
        report.no_effect(names, f"{report.at('checkpoint.keep')} keeps all checkpoints anyway")
    if checkpoint.keep_best is None:
        why = f"{report.at('checkpoint.keep_best')} goes by no metric"
        report.no_effect(("checkpoint.best_metric",), why)
    model = report.settings.model
    if not model.freeze and model.lora is None:
        report.no_effect(("checkpoint.frozen",), "no parameter is frozen, and all that train are in every checkpoint")
    if not checkpoint.asynchronous:
        why = f"training waits for each checkpoint, as {report.at('checkpoint.asynchronous')} says"
        report.no_effect(("checkpoint.when_busy",), why)


def _flow(report: _Report) -> None:
    kind = report.settings.flow.sigma_distribution
    if kind != "logit_normal":
        why = f"{report.at('flow.sigma_distribution')} does not use it"
        report.no_effect(("flow.logit_mean", "flow.logit_std"), why)
    if kind != "mode":
        report.no_effect(("flow.mode_scale",), f"{report.at('flow.sigma_distribution')} does not use it")


def _precision(report: _Report) -> None:
    precision = report.settings.precision
    names = ("precision.initial_loss_scale", "precision.loss_scale_window", "precision.min_loss_scale")
    if precision.mode != "fp16":
        report.no_effect(names, f"{report.at('precision.mode')} has no loss scale")
        return
    if precision.min_loss_scale > precision.initial_loss_scale:
        report.add(f"{report.at(names[2])} is more than {report.at(names[0])}")
    if report.settings.engine.backend == "deepspeed":
        if not math.log2(precision.initial_loss_scale).is_integer() or precision.initial_loss_scale < 1:
            report.add(f"{report.at(names[0])} is no power of two (1, 2, 4 ...), which DeepSpeed needs")
        if not precision.min_loss_scale.is_integer():
            report.add(f"{report.at(names[2])} is no whole number, which DeepSpeed needs")


def _engine(report: _Report) -> None:
    backend = report.at("engine.backend")
    if report.settings.engine.backend != "fsdp2":
        report.no_effect(
            (
                "engine.shard_size",
                "engine.reshard_after_forward",
                "engine.prefetch_blocks",
                "engine.reduce_every_micro_batch",
            ),
            f"{backend} has no such option",
        )
    _offloading(report)
    if report.settings.engine.backend != "deepspeed" and report.settings.engine.deepspeed is not None:
        places = [place for name, place in report.sources.items() if name.startswith("engine.deepspeed")]
        report.add(f"engine.deepspeed ({places[0]}) is given, but {backend} is no DeepSpeed; remove one of them")


def _offloading(report: _Report) -> None:
    engine, optimizer = report.settings.engine, report.settings.optimizer
    if engine.cpu_offload and engine.backend != "fsdp2":
        report.add(
            f"{report.at('engine.cpu_offload')} is for FSDP2, but {report.at('engine.backend')}; DeepSpeed offloads by "
            "its JSON (--ds ds_configs/zero2_offload.json or zero3_offload.json), DDP not at all"
        )
    if not engine.cpu_offload:
        why = f"{report.at('engine.cpu_offload')} keeps nothing in host memory"
        report.no_effect(("engine.pin_memory",), why)
    if optimizer.kind == "adamw_8bit":
        kind = report.at("optimizer.kind")
        if engine.backend == "deepspeed":
            report.add(
                f"{kind} does not go with {report.at('engine.backend')}, whose flat masters would put several "
                "parameters into a block of 8-bit moments; use --engine fsdp2, which shards as much, or offload the "
                "optimizer state (ds_configs/zero2_offload.json, zero3_offload.json)"
            )
        elif engine.cpu_offload:
            report.add(
                f"{kind} does not go with {report.at('engine.cpu_offload')}: 8-bit moments are for GPU memory, and "
                "there is no fast kernel for them on CPUs; use one of the two"
            )


def _average(report: _Report) -> None:
    if report.settings.optimizer.ema is not None:
        return
    ema = report.at("optimizer.ema")
    report.no_effect(("optimizer.ema_warmup",), f"{ema} keeps no average")
    for section, what in (("sampling", "pictures"), ("validation", "the held-out loss")):
        if getattr(report.settings, section).weights == "ema":
            report.add(
                f"{report.at(f'{section}.weights')} asks for {what} of averaged weights, but {ema} keeps none; set "
                f"optimizer.ema (to 0.9999, say), or leave out {section}.weights"
            )


def _augmentation(report: _Report) -> None:
    data = report.settings.data
    augments = data.augment != type(data.augment)()
    if augments and data.variants == 1:
        report.add(
            f"{report.at('data.augment')} has no effect: {report.at('data.variants')} leaves the plain version of each "
            "picture only; set it to how many versions of each sample are cached, e.g. 4"
        )
    elif data.variants > 1 and not augments:
        report.add(
            f"{report.at('data.variants')} has no effect: data.augment changes nothing, so all versions would be the "
            "same; set data.augment.flip, crop or colour"
        )


def _instructions(report: _Report) -> None:
    data = report.settings.data
    if data.safety == "off":
        why = f"{report.at('data.safety')} filters nothing; set it to flag or block"
        report.no_effect(("data.safety_rules", "data.safety_classifier"), why)
    if not data.paraphrases:
        why = f"{report.at('data.paraphrases')} uses each row's instruction only; set it to true"
        report.no_effect(("data.paraphrase_templates",), why)
    if data.safety_classifier is not None and not re.fullmatch(r"[\w.]+:[\w.]+", data.safety_classifier):
        report.add(f"{report.at('data.safety_classifier')} is not of the form module:function")


def _sampling(report: _Report) -> None:
    sampling = report.settings.sampling
    if _has_held_out(report.settings) or sampling.count == 0:
        return
    for name in ("every", "count"):
        fallback = type(sampling).model_fields[name].default
        if report.sources.get(f"sampling.{name}") != "--fast-dev-run" and getattr(sampling, name) != fallback:
            report.add(
                f"{report.at(f'sampling.{name}')} asks for pictures of held-out samples, but there are none; "
                "name a manifest in data.validation, or set sampling.count to 0 and leave out sampling.every"
            )


def _has_held_out(settings: Settings) -> bool:
    data = settings.data
    return data.validation is not None or data.validation_split is not None or data.manifest == "demo"


def _validation(report: _Report) -> None:
    validation, checkpoint = report.settings.validation, report.settings.checkpoint
    if validation.every is None:
        names = [
            f"validation.{name}"
            for name in ("samples", "sigmas", "weights", "seed")
            if report.sources.get(f"validation.{name}") != "--fast-dev-run"
        ]
        report.no_effect(tuple(names), f"{report.at('validation.every')} computes no held-out loss")
        if checkpoint.best_metric == "validation":
            report.add(
                f"{report.at('checkpoint.best_metric')} needs a held-out loss, but {report.at('validation.every')} "
                "computes none; set validation.every to checkpoint.every, or to a number that divides it"
            )
        return
    if not _has_held_out(report.settings):
        report.add(
            f"{report.at('validation.every')} asks for the loss on held-out samples, but there are none; name a "
            "manifest in data.validation, or a split of data.manifest in data.validation_split"
        )
    if checkpoint.best_metric == "validation" and (checkpoint.every or 0) % validation.every:
        report.add(
            f"{report.at('checkpoint.best_metric')} goes by the held-out loss of each checkpoint's own step, but "
            f"{report.at('checkpoint.every')} is no multiple of {report.at('validation.every')}, so that some "
            "checkpoints would have none; make it one"
        )


def world_problems(settings: Settings, sources: Mapping[str, str], world_size: int) -> list[str]:
    """One line for every setting that does not fit the number of ranks (batch sizes: see `derive_accumulation`)."""
    report = _Report(settings, sources)
    for name, size in (
        ("shard_size", settings.engine.shard_size),
        ("sequence_parallel", settings.engine.sequence_parallel),
    ):
        if size is not None and world_size % size:
            fitting = ", ".join(str(n) for n in range(1, world_size + 1) if world_size % n == 0)
            report.add(f"{report.at(f'engine.{name}')} does not divide {world_size} ranks; sizes that do: {fitting}")
    return report.lines
