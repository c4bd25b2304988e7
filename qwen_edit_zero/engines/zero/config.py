"""The DeepSpeed configuration as the ZeRO engine needs it, made from the merged JSON in `engine.deepspeed`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.models import OptimizerSettings, Settings


def zero_stage(config: dict[str, Any]) -> int:
    """The ZeRO stage. Raises SettingsError if it is none of 1, 2, 3."""
    stage = (config.get("zero_optimization") or {}).get("stage", 0)
    if stage not in (1, 2, 3):
        raise SettingsError(
            f"zero_optimization.stage is {stage!r} in the DeepSpeed configuration, but this engine is for ZeRO stages "
            f"1, 2 and 3. Set one of them, or use engine.backend=ddp for training without sharding."
        )
    return int(stage)


def complete_config(settings: Settings, optimizer: OptimizerSettings, world_size: int) -> dict[str, Any]:
    """A complete DeepSpeed configuration: nothing is left to DeepSpeed's defaults that changes results.

    Sizes of batches are nominal (one sample per rank): accumulation is controlled micro-batch by micro-batch, and
    losses are divided by the trainer. Optimizer and scheduler are built outside of DeepSpeed.

    Raises SettingsError for what DeepSpeed would do in a way that cannot be saved.
    """
    assert settings.engine.deepspeed is not None
    config = copy.deepcopy(settings.engine.deepspeed)
    stage = zero_stage(config)
    for section in ("optimizer", "scheduler", "amp", "bfloat16"):
        config.pop(section, None)
    mode = settings.precision.mode
    config.update(
        train_micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=1,
        train_batch_size=world_size,
        gradient_clipping=optimizer.clip_norm or 0.0,  # absent would mean 1.0
        steps_per_print=None,
        wall_clock_breakdown=False,
        zero_allow_untested_optimizer=True,
        # Sums of gradients, reduced and accumulated in fp32. ZeRO-3 can only average: its losses are multiplied.
        gradient_allreduce_op="mean" if stage == 3 else "sum",
        communication_data_type="fp32",
        data_types={**config.get("data_types", {}), "grad_accum_dtype": "fp32"},
        prescale_gradients=False,
        gradient_predivide_factor=1.0,
        bf16={"enabled": mode == "bf16", "check_grad_overflow": True},
        # The scale itself is ours (see LossScale) and given to DeepSpeed before every step.
        fp16={"enabled": mode == "fp16", "loss_scale": 1.0},
        # DeepSpeed's throughput meter synchronises the device in every forward pass.
        timers={"throughput": {"enabled": False, "synchronized": False}},
    )
    if optimizer.kind != "adamw":
        raise SettingsError(
            f"optimizer.kind is {optimizer.kind} with DeepSpeed: ZeRO lays parameters end to end in flat masters, in "
            f"which blocks of 8-bit moments would span several parameters and could not be saved exactly. Use "
            f"engine.backend=fsdp2, which shards as much, or keep adamw and offload its state "
            f"(ds_configs/zero{2 if stage < 3 else 3}_offload.json)."
        )
    zero = config["zero_optimization"]
    offload = zero.get("offload_optimizer") or {}
    if offload.get("device") == "nvme":
        raise SettingsError(
            "zero_optimization.offload_optimizer.device is 'nvme': optimizer state on NVMe cannot be checkpointed in "
            "this program's format. Use 'cpu'."
        )
    if offload.get("ratio", 1.0) != 1.0:
        raise SettingsError(
            f"zero_optimization.offload_optimizer.ratio is {offload['ratio']}: state that is split between two "
            f"optimizers cannot be checkpointed in this program's format. Remove it, all state then goes to the CPU."
        )
    # By default every bucket is all-reduced, which moves 1.5 times the bytes of reducing each part to its owner.
    zero["use_multi_rank_bucket_allreduce"] = False
    return config


def check_frozen(config: dict[str, Any], names: Sequence[str]) -> None:
    """Raise SettingsError if frozen parameters (`names`) would live on NVMe, where they get no values."""
    device = (config["zero_optimization"].get("offload_param") or {}).get("device")
    if device == "nvme" and names:
        raise SettingsError(
            f"zero_optimization.offload_param.device is 'nvme' and '{names[0]}' is frozen ({len(names)} such): "
            f"DeepSpeed writes parameters to NVMe when it has updated them, so frozen ones would never get their "
            f"values. Use 'cpu', or train everything."
        )


def offloads_optimizer(config: dict[str, Any]) -> bool:
    """Whether optimizer state lives in host memory."""
    device = (config["zero_optimization"].get("offload_optimizer") or {}).get("device", "none")
    return device not in (None, "none")
