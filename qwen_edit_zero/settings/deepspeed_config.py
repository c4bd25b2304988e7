"""Merge a DeepSpeed JSON with the settings of a run.

The JSON may say "auto" wherever the recipe decides. A number in it decides where neither recipe nor command line does,
and must agree with them where they do. What comes out is complete: DeepSpeed guesses nothing, in particular not
`gradient_clipping`, which means 1.0 when it is missing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from qwen_edit_zero.settings.deepspeed_keys import TOP_KEYS, check_keys, normalised
from qwen_edit_zero.settings.layers import Layer, Path, dotted
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.settings.problems import shown_value

_DIRECT: dict[Path, Path] = {
    ("train_batch_size",): ("batch", "global_size"),
    ("train_micro_batch_size_per_gpu",): ("batch", "micro_size"),
    ("gradient_clipping",): ("optimizer", "clip_norm"),
    ("optimizer", "params", "lr"): ("optimizer", "lr"),
    ("optimizer", "params", "betas"): ("optimizer", "betas"),
    ("optimizer", "params", "eps"): ("optimizer", "eps"),
    ("optimizer", "params", "weight_decay"): ("optimizer", "weight_decay"),
}
_FP16: dict[Path, Path] = {
    ("fp16", "initial_scale_power"): ("precision", "initial_loss_scale"),
    ("fp16", "loss_scale_window"): ("precision", "loss_scale_window"),
    ("fp16", "min_loss_scale"): ("precision", "min_loss_scale"),
}


@dataclass(frozen=True)
class Claim:
    """What a DeepSpeed JSON says about a setting: `key` with `said` in the file means `value` for `setting`."""

    setting: Path
    value: Any
    key: str
    said: Any
    place: str


def problems_of(json_layer: Layer) -> list[str]:
    """What is wrong with a DeepSpeed JSON by itself, one line a mistake, each with its place."""
    values = json_layer.values
    wrong = check_keys(values, TOP_KEYS)
    lines = [f"{json_layer.place(path)}: {text}" for path, text in wrong.items()]
    file = next(iter(json_layer.places.values()), "the DeepSpeed JSON").rsplit(":", 1)[0]
    zero = values.get("zero_optimization", {})
    if not isinstance(zero, dict) or wrong:
        return lines
    stage = zero.get("stage")
    if stage is None:
        lines.append(
            f"{file}: zero_optimization.stage is not given, and without it nothing is sharded; "
            "write 1, 2 or 3 (or leave the file out and use --engine ddp)"
        )
    if "train_batch_size" not in values and "train_micro_batch_size_per_gpu" not in values:
        lines.append(
            f"{file}: there is no batch size in it, which DeepSpeed needs; "
            'write "train_batch_size": "auto" and the recipe decides'
        )
    for name in ("offload_param", "offload_optimizer"):
        offload = zero.get(name, {})
        place = json_layer.place(("zero_optimization", name))
        if offload.get("device") == "nvme" and not offload.get("nvme_path"):
            lines.append(f"{place}: zero_optimization.{name} is on nvme, but nvme_path does not say where")
        if name == "offload_param" and offload.get("device", "none") != "none" and stage in (1, 2):
            lines.append(f"{place}: zero_optimization.offload_param works with stage 3 only, and the stage is {stage}")
        if offload.get("ratio", 1.0) < 1 and stage in (1, 2):
            lines.append(f"{place}: zero_optimization.offload_optimizer.ratio below 1 works with stage 3 only")
    if values.get("bf16", {}).get("enabled") is True and values.get("fp16", {}).get("enabled") is True:
        lines.append(
            f"{json_layer.place(('bf16', 'enabled'))}: bf16.enabled and fp16.enabled "
            f"({json_layer.place(('fp16', 'enabled'))}) are both true; there is one precision, switch one off"
        )
    return lines


def claims_of(json_layer: Layer, stated: Layer) -> list[Claim]:
    """What a DeepSpeed JSON without problems says about settings. `stated` is what recipe and command line say."""
    claims: list[Claim] = []
    precision = _precision_claim(json_layer, stated)
    if precision is not None:
        claims.append(precision)
    mode_path = ("precision", "mode")
    if stated.has(mode_path):
        mode = stated.get(mode_path)
    else:
        mode = precision.value if precision else Settings.model_fields["precision"].default.mode
    for path, setting in (_DIRECT | _FP16 if mode == "fp16" else _DIRECT).items():
        if not json_layer.has(path) or json_layer.get(path) == "auto":
            continue
        said = value = json_layer.get(path)
        if path == ("gradient_clipping",) and said == 0:
            value = None
        elif path == ("fp16", "initial_scale_power"):
            value = 2.0 ** int(said)
        elif isinstance(said, float) and said.is_integer() and setting[0] == "batch":
            value = int(said)
        place = json_layer.place(path)
        assert place is not None
        claims.append(Claim(setting, value, dotted(path), said, place))
    return claims


def _precision_claim(json_layer: Layer, stated: Layer) -> Claim | None:
    said = {name: json_layer.values.get(name, {}).get("enabled", "auto") for name in ("bf16", "fp16")}
    setting = ("precision", "mode")
    for name in ("bf16", "fp16"):
        if said[name] is True:
            return Claim(setting, name, f"{name}.enabled", True, json_layer.place((name, "enabled")) or "")
    mode = stated.get(setting) if stated.has(setting) else Settings.model_fields["precision"].default.mode
    if said.get(mode) is False:  # switched off; the other one is not on either
        return Claim(setting, "fp32", f"{mode}.enabled", False, json_layer.place((mode, "enabled")) or "")
    return None


def contradictions(claims: list[Claim], settings: Settings, sources: dict[str, str]) -> list[str]:
    """One line for every claim of the JSON that the settings do not share."""
    lines = []
    for claim in claims:
        section, name = claim.setting
        value = getattr(getattr(settings, section), name)
        value = list(value) if isinstance(value, tuple) else value
        if value == claim.value:
            continue
        setting = dotted(claim.setting)
        lines.append(
            f"{claim.place}: {claim.key} is {shown_value(claim.said)}, but {setting} is {shown_value(value)} "
            f'({sources[setting]}); make them agree, or write "auto" in the DeepSpeed JSON'
        )
    return lines


def frozen_problem(json_layer: Layer, settings: Settings, sources: dict[str, str]) -> str | None:
    """Why frozen parameters cannot be on NVMe: DeepSpeed writes them there after an update, which they never have."""
    place = ("zero_optimization", "offload_param", "device")
    model = settings.model
    frozen_by = "model.lora" if model.lora is not None else "model.freeze" if model.freeze else None
    if frozen_by is None or not json_layer.has(place) or json_layer.get(place) != "nvme":
        return None
    said = next((at for name, at in sources.items() if name.startswith(frozen_by)), "default")
    return (
        f"{frozen_by} ({said}) freezes parameters, and zero_optimization.offload_param.device is nvme "
        f"({json_layer.place(place)}): DeepSpeed writes to NVMe what it has updated, so that frozen parameters would "
        "have no values there; use cpu, or train everything"
    )


def accumulation_problem(
    json_layer: Layer, settings: Settings, sources: dict[str, str], world_size: int | None
) -> str | None:
    """What is wrong with `gradient_accumulation_steps`, if a number is given: the product must be the global size."""
    if json_layer.values.get("gradient_accumulation_steps", "auto") == "auto":
        return None

    def said(key: str, setting: str) -> tuple[int, str]:
        value = json_layer.values.get(key, "auto")
        if value != "auto":
            return int(value), f"{key} {int(value)} ({json_layer.place((key,))})"
        section, name = setting.split(".")
        value = getattr(getattr(settings, section), name)
        return value, f"{setting} {value} ({sources[setting]})"

    total, total_shown = said("train_batch_size", "batch.global_size")
    micro, micro_shown = said("train_micro_batch_size_per_gpu", "batch.micro_size")
    steps, steps_shown = said("gradient_accumulation_steps", "")
    if world_size is None:
        if total % (micro * steps) == 0:
            return None
        ranks = "any number of ranks"
    else:
        shares = world_size // settings.engine.sequence_parallel or 1
        if total == micro * steps * shares:
            return None
        what = "rank" if settings.engine.sequence_parallel == 1 else "sequence group"
        ranks = f"{shares} {what}{'s' if shares > 1 else ''} (launcher) = {micro * steps * shares}"
    return (
        f"{total_shown} is not {micro_shown} x {steps_shown} x {ranks}; "
        'write "gradient_accumulation_steps": "auto", it follows from the others'
    )


def completed(json_layer: Layer, settings: Settings) -> tuple[dict[str, Any], dict[Path, str]]:
    """Return the complete DeepSpeed configuration and the place of each of its values.

    `train_batch_size` and `gradient_accumulation_steps` are left out: the number of micro-batches may differ from step
    to step, and the training loop knows it.
    """
    result = normalised(json_layer.values, TOP_KEYS)
    for key in ("train_batch_size", "gradient_accumulation_steps", "optimizer"):
        result.pop(key, None)
    precision = settings.precision
    derived: dict[Path, tuple[Any, str]] = {
        ("train_micro_batch_size_per_gpu",): (settings.batch.micro_size, "batch.micro_size"),
        ("gradient_clipping",): (settings.optimizer.clip_norm or 0.0, "optimizer.clip_norm"),
        ("bf16", "enabled"): (precision.mode == "bf16", "precision.mode"),
        ("fp16", "enabled"): (precision.mode == "fp16", "precision.mode"),
    }
    if precision.mode == "fp16":
        power = round(math.log2(precision.initial_loss_scale))
        derived |= {
            ("fp16", "loss_scale"): (0, "default"),
            ("fp16", "initial_scale_power"): (power, "precision.initial_loss_scale"),
            ("fp16", "loss_scale_window"): (precision.loss_scale_window, "precision.loss_scale_window"),
            ("fp16", "min_loss_scale"): (int(precision.min_loss_scale), "precision.min_loss_scale"),
        }
    fallbacks: dict[Path, Any] = {
        ("zero_allow_untested_optimizer",): True,
        ("zero_optimization", "use_multi_rank_bucket_allreduce"): False,  # True sends 1.5 times the bytes
    }
    if precision.mode == "fp16":
        fallbacks["fp16", "hysteresis"] = 1  # every overflow lowers the loss scale, as in the other engines
    layer = Layer(result, dict(json_layer.places))
    for path, (value, place) in derived.items():
        layer.put(path, value, place)
    for path, value in fallbacks.items():
        if not layer.has(path):
            layer.put(path, value, "default")
    return layer.values, layer.places
