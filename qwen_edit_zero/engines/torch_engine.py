"""What DDP and FSDP2 share: both keep fp32 parameters, so AdamW runs on this rank's part of the parameters itself."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from qwen_edit_zero.engines.adamw import flat_moments, make_optimizer, prime_state, set_lr, set_step
from qwen_edit_zero.engines.base import ParallelEngine, Scalars, StepResult
from qwen_edit_zero.engines.blocks import prepare_blocks
from qwen_edit_zero.engines.collectives import first_names
from qwen_edit_zero.engines.ema import WeightAverage, unused_average
from qwen_edit_zero.engines.grad_norm import clip_coefficient, global_norm
from qwen_edit_zero.engines.initial_values import InitialValues
from qwen_edit_zero.engines.loss_scale import LossScale
from qwen_edit_zero.engines.parameters import frozen, move_buffers, to_meta, trained
from qwen_edit_zero.engines.precision import DTYPES
from qwen_edit_zero.engines.quantized import QuantizedMoment
from qwen_edit_zero.engines.ranks import arrange_ranks
from qwen_edit_zero.engines.shards import (
    Shard,
    check_state,
    gather_whole,
    read_frozen,
    read_state,
    read_values,
    written_ranges,
)
from qwen_edit_zero.engines.step_counts import StepCounts
from qwen_edit_zero.flat_state import FlatRange, TensorSource
from qwen_edit_zero.settings.models import OptimizerSettings, Settings


class TorchEngine(ParallelEngine):
    """Setup, optimizer step and state for engines whose parameters are plain fp32 tensors or dim-0 shards of them.

    AdamW never sees a DTensor: each trained parameter has a stand-in that aliases the local part of it, which keeps
    the fused kernels, costs no dispatch, and makes moments plain tensors.
    """

    def __init__(self, settings: Settings, device: torch.device) -> None:
        assert dist.is_initialized(), "the process group is started before an engine is made"
        self.device = device
        self.ranks = arrange_ranks(settings.engine)
        self._settings = settings
        self._dtype = DTYPES[settings.precision.mode]
        self._loss_scale = LossScale(settings.precision)
        self._steps = StepCounts()
        self._average: WeightAverage | None = None
        self._call: torch.nn.Module | None = None
        self._trained: dict[str, torch.nn.Parameter] = {}
        self._stand_ins: dict[str, torch.nn.Parameter] = {}
        # Where the shards of one copy of the model are: the ranks over which norms and whole tensors are assembled.
        self._shard_group: dist.ProcessGroup | None = None
        self._replica, self._replicas = 0, 1

    # What an engine adds -------------------------------------------------------------------------------------------

    @abstractmethod
    def _wrap(self, module: torch.nn.Module) -> None:
        """Shard the module, whose parameters are on the meta device, and give this rank's parts memory."""

    @abstractmethod
    def _after_values(self, module: torch.nn.Module) -> torch.nn.Module:
        """Called when the parameters have their values; returns what `forward` calls."""

    @abstractmethod
    def _local(self, tensor: torch.Tensor) -> torch.Tensor:
        """This rank's part of a parameter or gradient, contiguous."""

    @abstractmethod
    def _start(self, parameter: torch.nn.Parameter) -> int:
        """Flat index of the first element of this rank's part."""

    @abstractmethod
    def _is_replicated(self, parameter: torch.nn.Parameter) -> bool:
        """Whether every rank holds all of this parameter."""

    def _reduce_leftovers(self) -> None:
        """Sum gradients that the engine's library has not reduced."""

    # Setup ---------------------------------------------------------------------------------------------------------

    def init_context(self) -> AbstractContextManager[Any]:
        return torch.device("meta")

    def setup(self, module: torch.nn.Module, *, optimizer: OptimizerSettings, weights: TensorSource | None) -> None:
        values = InitialValues(module, weights)
        prepare_blocks(module, self._settings.model, self.device)
        to_meta(module, frozen_dtype=self._dtype)
        move_buffers(module, self.device)
        self.module = module
        self._wrap(module)
        read_values([*self._shards(), *self._frozen_shards()], values)
        self._call = self._after_values(module)

        self._trained = trained(module)
        for name, parameter in self._trained.items():
            if (local := self._local(parameter.detach())).numel():
                self._stand_ins[name] = torch.nn.Parameter(local)
        self._clip_norm = optimizer.clip_norm
        self._optimizer = make_optimizer(list(self._stand_ins.values()), optimizer, self.device)
        prime_state(self._optimizer, self._stand_ins.values())
        if optimizer.ema is not None:
            self._average = WeightAverage(optimizer, self._masters())
        module.train()

    # Training ------------------------------------------------------------------------------------------------------

    def forward(self, **inputs: Any) -> Any:
        assert self._call is not None, "setup comes first"
        return self._call(**inputs)

    def backward(self, loss: torch.Tensor) -> None:
        scale = self._loss_scale.value / self.ranks.sequence_size
        (loss * scale if scale != 1.0 else loss).backward()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, *, lr: float) -> StepResult:
        self._reduce_leftovers()
        scale = self._loss_scale.value
        gradients, counted = [], []
        for name, parameter in self._trained.items():
            stand_in = self._stand_ins.get(name)
            if stand_in is None:
                continue
            stand_in.data = self._local(parameter.detach())  # FSDP2 may have moved it
            # A parameter that took no part gets a zero gradient: its moments and weight decay go on as in any engine.
            gradient = torch.zeros_like(stand_in) if parameter.grad is None else self._local(parameter.grad)
            stand_in.grad = gradient
            gradients.append(gradient)
            if not self._is_replicated(parameter) or self._is_first_of_shard_group():
                counted.append(gradient)
        norm = global_norm(counted, device=self.device, group=self._shard_group, reduce=self._reduces_norm()) / scale

        finite = math.isfinite(norm)
        vetoed = finite and self.veto is not None and self.veto(norm)
        non_finite: tuple[str, ...] = ()
        if finite and not vetoed:
            factor = clip_coefficient(norm, self._clip_norm) / scale
            if factor != 1.0 and gradients:
                torch._foreach_mul_(gradients, factor)
            set_lr(self._optimizer, lr)
            if gradients:
                self._optimizer.step()
            self._steps.common += 1
            if self._average is not None:
                self._average.update(self._masters())
        elif not finite:
            mine = [n for n, s in self._stand_ins.items() if s.grad is not None and not s.grad.isfinite().all()]
            non_finite = first_names(mine, self._trained)
        self._loss_scale.update(finite=finite)
        self._optimizer.zero_grad(set_to_none=True)
        for parameter in self._trained.values():
            parameter.grad = None
        applied = finite and not vetoed
        return StepResult(grad_norm=norm, applied=applied, loss_scale=scale, non_finite=non_finite, vetoed=vetoed)

    def _is_first_of_shard_group(self) -> bool:
        return self._shard_group is None or dist.get_rank(self._shard_group) == 0

    def _reduces_norm(self) -> bool:
        return self._shard_group is not None

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self._after_eval()
            self.module.train()

    def _after_eval(self) -> None:
        """Undo what a forward pass without a backward pass leaves behind."""

    @contextmanager
    def averaged(self) -> Iterator[None]:
        assert self._average is not None, "optimizer.ema is off"
        self._after_eval()  # nothing may stay gathered from before
        with self._average.swapped(self._masters()):
            yield

    # State ---------------------------------------------------------------------------------------------------------

    def _masters(self) -> dict[str, torch.Tensor]:
        """This rank's elements of the trained parameters, 1-D."""
        return {name: self._local(self._trained[name].detach()).view(-1) for name in self._stand_ins}

    def _shard(
        self,
        name: str,
        parameter: torch.nn.Parameter,
        moments: Mapping[str, torch.Tensor | QuantizedMoment],
        average: torch.Tensor | None = None,
    ) -> Shard:
        return Shard(
            name=name,
            shape=tuple(parameter.shape),
            start=self._start(parameter),
            values=self._local(parameter.detach()).view(-1),
            moments=moments,
            average=average,
            replicated=self._is_replicated(parameter),
        )

    def _shards(self) -> list[Shard]:
        """This rank's shards of the trained parameters. Moments are missing until the optimizer exists."""
        shards = []
        for name, parameter in trained(self.module).items():
            stand_in = self._stand_ins.get(name)
            moments = {} if stand_in is None else flat_moments(self._optimizer, stand_in)
            average = None if stand_in is None or self._average is None else self._average[name]
            shards.append(self._shard(name, parameter, moments, average))
        return shards

    def _frozen_shards(self) -> list[Shard]:
        return [self._shard(name, parameter, {}) for name, parameter in frozen(self.module).items()]

    def local_state(self) -> Iterator[FlatRange]:
        shards = self._shards()
        yield from written_ranges(
            [s for s in shards if not s.replicated], replica=self._replica, replicas=self._replicas
        )
        everywhere = [s for s in shards if s.replicated]
        yield from written_ranges(everywhere, replica=self.ranks.rank, replicas=self.ranks.world_size)

    def scalars(self) -> Scalars:
        average = {} if self._average is None else self._average.scalars()
        return {**self._steps.scalars(), **average, **self._loss_scale.scalars()}

    def load_state(self, source: TensorSource, scalars: Mapping[str, Any], *, frozen: bool = False) -> tuple[str, ...]:
        shapes = {name: tuple(p.shape) for name, p in trained(self.module).items()}
        check_state(shapes, source)
        steps = StepCounts.of_scalars(scalars, shapes)
        shards = self._shards()
        read_state(shards, source)
        if frozen:
            read_frozen(self.module, self._frozen_shards(), source)
        for name, stand_in in self._stand_ins.items():
            set_step(self._optimizer, stand_in, steps.of(name))
        self._steps = steps
        self._loss_scale.load(scalars)
        return unused_average(source) if self._average is None else self._average.load(shapes, shards, source, scalars)

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        for parameter in self.module.parameters():
            kind = "masters" if parameter.requires_grad else "parameters"
            yield kind, self._local(parameter.detach())
            if parameter.grad is not None:
                yield "gradients", self._local(parameter.grad)
        for state in self._optimizer.state.values():
            yield from (("moments", value) for value in state.values() if isinstance(value, torch.Tensor))
        if self._average is not None:
            yield from (("ema", self._average[name]) for name in self._stand_ins)

    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.module.named_parameters():
            shard = self._shard(name, parameter, {})
            yield name, gather_whole(shard.shape, shard, device=self.device, group=self._shard_group)

    def close(self) -> None:
        self._call = None
        self._trained.clear()
        self._stand_ins.clear()
