"""DeepSpeed itself: how it is started, kept quiet, and which decisions are taken away from it."""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from qwen_edit_zero.engines.collectives import bound_waiting
from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.models import Settings

_COMPILING_SECONDS = 900.0  # it takes two minutes on an idle machine
ZERO_OPTIMIZATION = "zero_optimization"


def start_deepspeed(settings: Settings, device: torch.device) -> None:
    """Let DeepSpeed use the process group that is there, with our timeout.

    Raises SettingsError if DeepSpeed does not offer the precision on this device.
    """
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", str(device.index or 0)))
    import deepspeed.ops
    from deepspeed import comm
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import groups, logger

    # DeepSpeed calls collectives by names that newer torch deprecates, and every call would say so.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # The trainer reports skipped steps, with more to say.
    logger.addFilter(_not_about_overflow)
    if not comm.is_initialized():
        # An extension for inference on CPUs that would be compiled here, for minutes, and never used.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        comm.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    bound_waiting([groups._clone_world_group()], settings.engine.timeout_seconds)
    if settings.precision.mode == "fp16" and not get_accelerator().is_fp16_supported():
        raise SettingsError(
            "precision is fp16, which DeepSpeed does not offer on this device. Use precision=bf16 or fp32, or another "
            "engine."
        )


def _not_about_overflow(record: logging.LogRecord) -> bool:
    return "OVERFLOW" not in str(record.msg)


def make_engine(
    module: torch.nn.Module, optimizer: torch.optim.Optimizer, config: dict[str, Any], timeout_seconds: int
) -> Any:
    """A DeepSpeed engine over the module's trained parameters, which `optimizer` holds."""
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.utils import groups

    class Engine(DeepSpeedEngine):  # type: ignore[misc]
        """DeepSpeed's engine, with three decisions taken away from it."""

        def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str:
            # For bf16 with fp32 accumulation DeepSpeed would put its BF16_Optimizer in the place of ZeRO-1: that one
            # all-reduces whole fp32 gradients and applies steps with non-finite ones.
            return ZERO_OPTIMIZATION

        def _broadcast_model(self) -> None:
            # Every rank reads its own part of the weights.
            return

        def allreduce_gradients(self, *args: Any, **kwargs: Any) -> None:
            if self.zero_optimization_stage() == 1 and self.is_gradient_accumulation_boundary():
                _reduce_leftovers(self.optimizer)
            super().allreduce_gradients(*args, **kwargs)

    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    engine = Engine(
        args=None,
        model=module,
        optimizer=optimizer,
        model_parameters=parameters,
        config=config,
        config_class=DeepSpeedConfig(config),
    )
    # Hierarchical partitioning (ZeRO++) makes groups of its own.
    bound_waiting([groups._get_zero_param_intra_parallel_group()], timeout_seconds)
    return engine


def _reduce_leftovers(optimizer: Any) -> None:
    """Reduce accumulated gradients of parameters that got none in the last micro-batch.

    With `overlap_comm`, ZeRO-1 reduces a gradient when the last micro-batch adds to it, and forgets the others.
    """
    if not optimizer.overlap_comm:
        return
    optimizer.reduce_ipg_grads()
    for group, parameters in enumerate(optimizer.bit16_groups):
        for parameter in parameters:
            reduced = optimizer.params_already_reduced[optimizer.get_param_id(parameter)]
            if not reduced and optimizer.get_gradient_for_reduction(parameter) is not None:
                optimizer.reduce_ready_partitions_and_remove_grads(parameter, group)


def watch_overflow(optimizer: Any, on_overflow: Callable[[], None]) -> None:
    """Have `on_overflow` called on every rank when DeepSpeed has decided to skip a step, before it drops gradients."""
    update_scale = optimizer._update_scale

    def update(has_overflow: bool = False) -> Any:
        if has_overflow:
            on_overflow()
        return update_scale(has_overflow)

    optimizer._update_scale = update


@contextmanager
def vetoing(optimizer: Any, stage: int, veto: Callable[[float], bool] | None, vetoed: list[float]) -> Iterator[None]:
    """Inside, a step that `veto` will not have is skipped as one with an infinite gradient is; its norm is put into
    `vetoed`."""
    if veto is None:
        yield
        return
    name = "_get_norm_groups" if stage == 3 else "scaled_global_norm"
    compute = getattr(optimizer, name)

    def computed(*args: Any, **kwargs: Any) -> Any:
        found = compute(*args, **kwargs)
        norm = combine_grad_norm_groups(found) if stage == 3 else found
        if is_invalid_grad_norm(norm):
            return found
        value = float(norm) / float(optimizer.loss_scale)
        if veto(value):
            vetoed.append(value)
            infinite = torch.full_like(norm, math.inf)
            return [infinite] if stage == 3 else infinite
        return found

    from deepspeed.runtime.utils import combine_grad_norm_groups, is_invalid_grad_norm

    setattr(optimizer, name, computed)
    try:
        yield
    finally:
        delattr(optimizer, name)


def make_cpu_adamw(parameters: list[torch.nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    """AdamW for state in host memory; compiled on first use, which takes a minute or two.

    Raises SettingsError if a compilation that was killed has left its lock, for which everybody would wait for ever.
    """
    refuse_stale_lock("cpu_adam")
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    adamw: torch.optim.Optimizer = DeepSpeedCPUAdam(parameters, adamw_mode=True, **options)
    return adamw


def refuse_stale_lock(extension: str) -> None:
    """Raise SettingsError if an extension's build folder has been locked for longer than compiling it takes."""
    from torch.utils.cpp_extension import _get_build_directory

    lock = Path(_get_build_directory(extension, False)) / "lock"
    try:
        age = time.time() - lock.stat().st_mtime
    except FileNotFoundError:
        return
    if age > _COMPILING_SECONDS:
        raise SettingsError(
            f"{lock} is {age / 60:.0f} minutes old: a program was killed while compiling DeepSpeed's {extension}, "
            "and everybody would wait for it. Delete that file and start again"
        )
