"""DeepSpeed ZeRO stages 1, 2 and 3. The only module that imports deepspeed (which takes ten seconds)."""

from __future__ import annotations

import logging
import math
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from qwen_edit_zero.engines.adamw import make_adamw, prime_state, set_step
from qwen_edit_zero.engines.base import ParallelEngine, Scalars, StepResult
from qwen_edit_zero.engines.blocks import checkpoint_blocks, compile_blocks
from qwen_edit_zero.engines.collectives import bound_waiting
from qwen_edit_zero.engines.initial_values import InitialValues
from qwen_edit_zero.engines.loss_scale import LossScale
from qwen_edit_zero.engines.parameters import frozen, move_buffers, replace_parameters, to_meta, trained
from qwen_edit_zero.engines.precision import DTYPES
from qwen_edit_zero.engines.scalars import optimizer_steps
from qwen_edit_zero.engines.shards import (
    MOMENTS,
    Shard,
    check_state,
    gather_whole,
    read_state,
    read_values,
    written_ranges,
)
from qwen_edit_zero.engines.zero_config import complete_config, offloads_optimizer, zero_stage
from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.flat_state import FlatRange, TensorSource
from qwen_edit_zero.settings.models import OptimizerSettings, Settings

_ZERO_OPTIMIZATION = "zero_optimization"


class ZeroEngine(ParallelEngine):
    """ZeRO: fp32 masters and moments are sharded; so are gradients from stage 2 and parameters in stage 3."""

    name = "deepspeed"

    def __init__(self, settings: Settings, device: torch.device) -> None:
        assert dist.is_initialized(), "the process group is started before an engine is made"
        if settings.engine.deepspeed is None:
            raise SettingsError("engine.backend is deepspeed but there is no DeepSpeed configuration; give --ds FILE.")
        self.stage = zero_stage(settings.engine.deepspeed)
        if settings.model.compile and self.stage == 3:
            raise SettingsError(
                "model.compile is on under ZeRO-3, whose hooks in every layer break compiled code into pieces slower "
                "than eager. Switch it off, or use engine.backend=fsdp2, which shards as much and compiles."
            )
        self.device = device
        self.dp_rank, self.dp_size = dist.get_rank(), dist.get_world_size()
        self._settings = settings
        self._dtype = DTYPES[settings.precision.mode]
        self._loss_scale = LossScale(settings.precision)
        self._steps = 0
        self._is_last = True
        _prepare_deepspeed(device, settings.engine.timeout_seconds)
        _check_precision(settings)
        self._engine: Any = None

    # Setup ---------------------------------------------------------------------------------------------------------

    def init_context(self) -> AbstractContextManager[Any]:
        return torch.device("meta")

    def setup(self, module: torch.nn.Module, *, optimizer: OptimizerSettings, weights: TensorSource | None) -> None:
        from deepspeed.ops.adam import DeepSpeedCPUAdam
        from deepspeed.runtime.config import DeepSpeedConfig

        values = InitialValues(module, weights)
        config = complete_config(self._settings, optimizer, self.dp_size)
        if self._settings.model.compile:
            compile_blocks(module)
        if self._settings.model.activation_checkpointing == "block":
            checkpoint_blocks(module, early_stop=self.stage < 3)
        to_meta(module, frozen_dtype=self._dtype)
        move_buffers(module, self.device)
        self.module = module
        if self.stage == 3:
            self._partition(module, config)
        else:
            replace_parameters(module, lambda _, meta: torch.empty(meta.shape, dtype=self._dtype, device=self.device))
        read_values(self._frozen_shards(), values)

        parameters = list(trained(module).values())
        if offloads_optimizer(config):
            basic = DeepSpeedCPUAdam(
                parameters,
                lr=optimizer.lr,
                betas=optimizer.betas,
                eps=optimizer.eps,
                weight_decay=optimizer.weight_decay,
                adamw_mode=True,
            )
        else:
            basic = make_adamw(parameters, optimizer, self.device)
        engine_class = _engine_class()
        self._engine = engine_class(
            args=None, model=module, optimizer=basic, model_parameters=parameters, config=config,
            config_class=DeepSpeedConfig(config),
        )  # fmt: skip
        prime_state(basic, self._flat_masters())
        with torch.no_grad():
            for flat in self._flat_masters():
                flat.zero_()  # padding between parameters
        read_values(self._shards(), values)
        self._publish_masters()
        self._announce_loss_scale()
        module.train()

    def _partition(self, module: torch.nn.Module, config: dict[str, Any]) -> None:
        """Turn meta parameters into ZeRO-3 partitions, one at a time.

        `zero.Init` as a context would build every layer for real, initialise it, broadcast it, and change the dtype
        of other tensors made in constructors; its conversion of a single parameter is all that is needed.
        """
        from deepspeed import zero

        converter = zero.Init(config_dict_or_path=config, dtype=self._dtype, enabled=False)

        def make(_: str, meta: torch.nn.Parameter) -> torch.nn.Parameter:
            whole = torch.empty(meta.shape, dtype=self._dtype, device=self.device)
            parameter: Any = torch.nn.Parameter(whole, requires_grad=meta.requires_grad)
            converter._convert_to_deepspeed_param(parameter)
            parameter.partition()
            assert isinstance(parameter, torch.nn.Parameter)
            return parameter

        replace_parameters(module, make)

    # Training ------------------------------------------------------------------------------------------------------

    def forward(self, **inputs: Any) -> Any:
        def cast(value: Any) -> Any:
            is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
            return value.to(self._dtype) if is_float else value

        return self._engine(**{name: cast(value) for name, value in inputs.items()})

    @contextmanager
    def micro_step(self, *, is_last: bool) -> Iterator[None]:
        self._engine.set_gradient_accumulation_boundary(is_last)
        yield

    def backward(self, loss: torch.Tensor) -> None:
        # Stage 3 averages over ranks whatever it is told.
        self._engine.backward(loss * self.dp_size if self.stage == 3 else loss, scale_wrt_gas=False)

    def step(self, *, lr: float) -> StepResult:
        optimizer = self._engine.optimizer
        scale = self._loss_scale.value
        optimizer.set_lr(lr)
        self._engine.step()
        applied = bool(self._engine.was_step_applied())
        norm = float(self._engine.get_global_grad_norm())
        self._forget_gradients()
        self._steps += applied
        self._loss_scale.update(finite=applied)
        self._announce_loss_scale()
        return StepResult(grad_norm=norm if applied else math.inf, applied=applied, loss_scale=scale)

    def _forget_gradients(self) -> None:
        """Clear what DeepSpeed's step leaves behind and adds to in the next step."""
        optimizer = self._engine.optimizer
        if self.stage == 3:
            # A parameter without gradient in the next step's first micro-batch would meet this step's gradient here.
            optimizer.grad_partitions_flat_buffer.zero_()
        else:
            # After a skipped step with offloading, the non-finite gradients stay and no later step is ever applied.
            optimizer.averaged_gradients.update(dict.fromkeys(optimizer.averaged_gradients))

    def _announce_loss_scale(self) -> None:
        """DeepSpeed multiplies losses by this and divides gradients by it."""
        if self._loss_scale.enabled:
            mean_to_sum = self.dp_size if self.stage == 3 else 1  # see backward
            self._engine.optimizer.override_loss_scale(self._loss_scale.value / mean_to_sum)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        self._engine.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._engine.train()

    # State ---------------------------------------------------------------------------------------------------------

    def _flat_masters(self) -> list[torch.Tensor]:
        """The fp32 masters of this rank: one flat tensor for each of DeepSpeed's groups."""
        optimizer = self._engine.optimizer
        flats = optimizer.fp32_partitioned_groups_flat if self.stage == 3 else optimizer.single_partition_of_fp32_groups
        return list(flats)

    def _place(self, parameter: Any) -> tuple[torch.Tensor, int, int, int] | None:
        """(flat master, offset in it, flat index in the parameter, length) of this rank's part of a parameter."""
        optimizer = self._engine.optimizer
        if self.stage == 3:
            group, offset, size = optimizer.grad_position[optimizer.get_param_id(parameter)]
            start = size * parameter.ds_zero_partition_rank
            length = min(size, parameter.ds_numel - start)
            return (optimizer.fp32_partitioned_groups_flat[group], offset, start, length) if length > 0 else None
        mapping = parameter._hp_mapping
        if mapping is None:
            return None
        here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
        return optimizer.single_partition_of_fp32_groups[mapping.param_group_index], here.start, there.start, here.numel

    def _shards(self) -> list[Shard]:
        shards = []
        for name, parameter in trained(self.module).items():
            if (place := self._place(parameter)) is not None:
                flat, offset, start, length = place
                state = self._engine.basic_optimizer.state[flat]
                shards.append(
                    Shard(
                        name=name,
                        shape=_shape(parameter),
                        start=start,
                        values=flat.detach()[offset : offset + length],
                        moments={kind: state[kind][offset : offset + length] for kind in MOMENTS},
                    )
                )
        return shards

    def _frozen_shards(self) -> list[Shard]:
        shards = []
        for name, parameter in frozen(self.module).items():
            if self.stage < 3:
                shards.append(Shard(name, _shape(parameter), 0, parameter.detach().view(-1), replicated=True))
                continue
            partition: Any = parameter.ds_tensor  # type: ignore[attr-defined]
            start = partition.numel() * parameter.ds_zero_partition_rank  # type: ignore[attr-defined]
            length = max(0, min(partition.numel(), parameter.ds_numel - start))  # type: ignore[attr-defined]
            shards.append(Shard(name, _shape(parameter), start, partition.detach()[:length]))
        return shards

    def _publish_masters(self) -> None:
        """Make the parameters that the model computes with those of the masters, on all ranks."""
        optimizer = self._engine.optimizer
        if self.stage < 3:
            optimizer.update_lp_params()
            return
        optimizer._partition_all_parameters()
        for group in range(len(optimizer.fp16_groups)):
            optimizer._reassign_or_swap_out_partitioned_parameters(group)

    def local_state(self) -> Iterator[FlatRange]:
        return written_ranges(self._shards(), replica=0, replicas=1)

    def scalars(self) -> Scalars:
        return {"optimizer_steps": self._steps, **self._loss_scale.scalars()}

    def load_state(self, source: TensorSource, scalars: Mapping[str, int | float | bool | str]) -> None:
        check_state({name: _shape(parameter) for name, parameter in trained(self.module).items()}, source)
        steps = optimizer_steps(scalars)
        read_state(self._shards(), source)
        set_step(self._engine.basic_optimizer, steps)
        self._steps = steps
        self._loss_scale.load(scalars)
        self._announce_loss_scale()
        self._publish_masters()

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        held = {shard.name: shard for shard in [*self._shards(), *self._frozen_shards()]}
        for name, parameter in self.module.named_parameters():
            yield name, gather_whole(_shape(parameter), held.get(name), device=self.device, group=None)

    def close(self) -> None:
        if self._engine is not None:
            self._engine.destroy()
            self._engine = None


def _shape(parameter: Any) -> tuple[int, ...]:
    """Shape of the whole parameter, also of one that ZeRO-3 has released."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _prepare_deepspeed(device: torch.device, timeout_seconds: int) -> None:
    """Let DeepSpeed use the process group that is there, with our timeout, and keep it quiet."""
    os.environ.setdefault("DS_ACCELERATOR", device.type)
    os.environ.setdefault("LOCAL_RANK", os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", str(device.index or 0)))
    import deepspeed.ops
    from deepspeed import comm
    from deepspeed.utils import groups, logger

    # DeepSpeed calls collectives by names that newer torch deprecates, and every call would say so.
    warnings.filterwarnings("ignore", r"`torch\.distributed\.\w+` is deprecated", FutureWarning)
    # The trainer reports skipped steps, with more to say.
    logger.addFilter(_not_about_overflow)
    if not comm.is_initialized():
        # An extension for CPUs that would be compiled here and is never used in training.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        comm.init_distributed(dist_backend=dist.get_backend(), auto_mpi_discovery=False, verbose=False)
    bound_waiting([groups._clone_world_group()], timeout_seconds)


def _check_precision(settings: Settings) -> None:
    from deepspeed.accelerator import get_accelerator

    if settings.precision.mode == "fp16" and not get_accelerator().is_fp16_supported():
        raise SettingsError(
            "precision is fp16, which DeepSpeed does not offer on this device. Use precision=bf16 or fp32, or another "
            "engine."
        )


def _not_about_overflow(record: logging.LogRecord) -> bool:
    return "OVERFLOW" not in str(record.msg)


def _engine_class() -> Any:
    from deepspeed.runtime.engine import DeepSpeedEngine

    class Engine(DeepSpeedEngine):  # type: ignore[misc]
        """DeepSpeed's engine, with two decisions taken away from it."""

        def _do_optimizer_sanity_check(self, basic_optimizer: torch.optim.Optimizer) -> str:
            # For bf16 with fp32 accumulation DeepSpeed would put its BF16_Optimizer in the place of ZeRO-1: that one
            # all-reduces whole fp32 gradients and applies steps with non-finite ones.
            return _ZERO_OPTIMIZATION

        def _broadcast_model(self) -> None:
            # Every rank reads its own part of the weights.
            return

    return Engine
