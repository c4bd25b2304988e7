"""From settings to the engine they name. Imports no library of an engine that is not used."""

from __future__ import annotations

import torch

from qwen_edit_zero.engines.base import ParallelEngine
from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.models import Settings


def make_engine(settings: Settings, *, device: torch.device) -> ParallelEngine:
    """The engine `settings.engine.backend`, on this rank's `device`. The process group must have been started.

    Raises:
        SettingsError: the settings do not fit the number of ranks, the device or each other.
    """
    _check_device(settings, device)
    match settings.engine.backend:
        case "ddp":
            from qwen_edit_zero.engines.ddp import DDPEngine

            return DDPEngine(settings, device)
        case "fsdp2":
            from qwen_edit_zero.engines.fsdp2 import FSDP2Engine

            return FSDP2Engine(settings, device)
        case "deepspeed":
            from qwen_edit_zero.engines.zero.engine import ZeroEngine

            return ZeroEngine(settings, device)


def _check_device(settings: Settings, device: torch.device) -> None:
    if device.type != "cuda":
        return
    if settings.precision.mode == "bf16" and torch.cuda.get_device_capability(device)[0] < 8:
        raise SettingsError(
            f"precision is bf16, but {torch.cuda.get_device_name(device)} computes bf16 only by emulation; it needs "
            f"an A100 (compute capability 8.0) or newer. Use precision=fp16 on this device."
        )
