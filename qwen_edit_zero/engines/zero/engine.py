"""The ZeRO engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
import torch.distributed as dist

from qwen_edit_zero.engines.adamw import make_adamw, prime_state
from qwen_edit_zero.engines.base import ParallelEngine, Scalars, StepResult
from qwen_edit_zero.engines.blocks import prepare_blocks
from qwen_edit_zero.engines.collectives import first_names
from qwen_edit_zero.engines.ema import WeightAverage, unused_average
from qwen_edit_zero.engines.host_memory import release_freed_memory
from qwen_edit_zero.engines.initial_values import InitialValues
from qwen_edit_zero.engines.loss_scale import LossScale
from qwen_edit_zero.engines.parameters import frozen, move_buffers, replace_parameters, to_meta, trained
from qwen_edit_zero.engines.precision import DTYPES
from qwen_edit_zero.engines.ranks import arrange_ranks
from qwen_edit_zero.engines.shards import (
    MOMENTS,
    Shard,
    check_state,
    gather_whole,
    read_frozen,
    read_state,
    read_values,
    written_ranges,
)
from qwen_edit_zero.engines.step_counts import StepCounts
from qwen_edit_zero.engines.zero import library
from qwen_edit_zero.engines.zero.config import check_frozen, complete_config, offloads_optimizer, zero_stage
from qwen_edit_zero.engines.zero.holdings import held
from qwen_edit_zero.engines.zero.masters import (
    Place,
    flat_masters,
    non_finite_parameters,
    places,
    publish_masters,
)
from qwen_edit_zero.engines.zero.partition import let_linears_forget_weights, partition_parameters
from qwen_edit_zero.engines.zero.parts import step_in_parts
from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.flat_state import FlatRange, TensorSource
from qwen_edit_zero.settings.models import OptimizerSettings, Settings


class ZeroEngine(ParallelEngine):
    """ZeRO: fp32 masters and moments are sharded; so are gradients from stage 2 and parameters in stage 3."""

    def __init__(self, settings: Settings, device: torch.device) -> None:
        assert dist.is_initialized(), "the process group is started before an engine is made"
        if settings.engine.deepspeed is None:
            raise SettingsError("engine.backend is deepspeed but there is no DeepSpeed configuration; give --ds FILE.")
        self.stage = zero_stage(settings.engine.deepspeed)
        self.name = f"zero{self.stage}"
        if settings.model.compile and self.stage == 3:
            raise SettingsError(
                "model.compile is on under ZeRO-3, whose hooks in every layer break compiled code into pieces slower "
                "than eager. Switch it off, or use engine.backend=fsdp2, which shards as much and compiles."
            )
        if settings.model.activation_checkpointing == "selective" and self.stage == 3:
            raise SettingsError(
                "model.activation_checkpointing is selective under ZeRO-3, which gathers weights inside of blocks by "
                "other operations in the backward pass than in the forward pass; torch cannot tell these from the "
                "model's. Use block, or engine.backend=fsdp2, which shards as much."
            )
        self.device = device
        self.ranks = arrange_ranks(settings.engine)
        complete_config(settings, settings.optimizer, self.ranks.world_size)  # refuses what cannot work, early
        self._settings = settings
        self._dtype = DTYPES[settings.precision.mode]
        self._loss_scale = LossScale(settings.precision)
        self._steps = StepCounts()
        self._average: WeightAverage | None = None
        self._engine: Any = None
        self._places: dict[int, Place] = {}
        self._non_finite: list[str] = []
        library.start_deepspeed(settings, device)

    # Setup ---------------------------------------------------------------------------------------------------------

    def init_context(self) -> AbstractContextManager[Any]:
        return torch.device("meta")

    def setup(self, module: torch.nn.Module, *, optimizer: OptimizerSettings, weights: TensorSource | None) -> None:
        values = InitialValues(module, weights)
        config = complete_config(self._settings, optimizer, self.ranks.world_size)
        check_frozen(config, list(frozen(module)))
        prepare_blocks(module, self._settings.model, self.device, early_stop=self.stage < 3)
        to_meta(module, frozen_dtype=self._dtype)
        move_buffers(module, self.device)
        self.module = module
        if self.stage == 3:
            partition_parameters(module, config, dtype=self._dtype, device=self.device)
            let_linears_forget_weights(module)
        else:
            replace_parameters(module, lambda _, meta: torch.empty(meta.shape, dtype=self._dtype, device=self.device))
        read_values(self._frozen_shards(), values)

        self._adamw = self._make_adamw(optimizer, offload=offloads_optimizer(config))
        self._engine = library.make_engine(module, self._adamw, config, self._settings.engine.timeout_seconds)
        release_freed_memory()
        library.watch_overflow(self._engine.optimizer, self._note_non_finite)
        self._places = places(self._engine.optimizer, self.stage, trained(module).values(), self.ranks.rank)
        masters = flat_masters(self._engine.optimizer, self.stage)
        prime_state(self._adamw, masters)
        for flat in masters:
            flat.detach().zero_()  # padding between parameters
        read_values(self._shards(), values)
        publish_masters(self._engine.optimizer, self.stage)
        if optimizer.ema is not None:
            self._average = WeightAverage(optimizer, self._masters())
        self._announce_loss_scale()
        module.train()

    def _make_adamw(self, optimizer: OptimizerSettings, *, offload: bool) -> torch.optim.Optimizer:
        parameters = list(trained(self.module).values())
        if not offload:
            return make_adamw(parameters, optimizer, self.device)
        return library.make_cpu_adamw(
            parameters,
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )

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
        share = (self.ranks.world_size if self.stage == 3 else 1) / self.ranks.sequence_size  # stage 3 always averages
        self._engine.backward(loss * share if share != 1.0 else loss, scale_wrt_gas=False)

    def step(self, *, lr: float) -> StepResult:
        scale = self._loss_scale.value
        self._engine.optimizer.set_lr(lr)
        vetoed: list[float] = []
        with library.vetoing(self._engine.optimizer, self.stage, self.veto, vetoed):
            self._engine.step()
        applied = bool(self._engine.was_step_applied())
        norm = float(self._engine.get_global_grad_norm())
        non_finite = () if applied else first_names(self._non_finite, trained(self.module))
        self._forget_gradients()
        self._steps.common += applied
        if applied and self._average is not None:
            self._average.update(self._masters())
        self._loss_scale.update(finite=applied or bool(vetoed))
        self._announce_loss_scale()
        if vetoed:
            return StepResult(vetoed[0], False, loss_scale=scale, vetoed=True)
        return StepResult(norm if applied else math.inf, applied, loss_scale=scale, non_finite=non_finite)

    def _note_non_finite(self) -> None:
        """Called while DeepSpeed still has the gradients of a step that it is about to skip."""
        found = non_finite_parameters(self._engine.optimizer, self.stage, self._places)
        self._non_finite = [name for name, parameter in trained(self.module).items() if id(parameter) in found]

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
            mean_to_sum = self.ranks.world_size if self.stage == 3 else 1  # see backward
            self._engine.optimizer.override_loss_scale(self._loss_scale.value / mean_to_sum)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        self.module.eval()
        try:
            with torch.no_grad():
                yield
        finally:
            self.module.train()

    @contextmanager
    def averaged(self) -> Iterator[None]:
        assert self._average is not None, "optimizer.ema is off"
        try:
            with self._average.swapped(self._masters()):
                publish_masters(self._engine.optimizer, self.stage)
                yield
        finally:
            publish_masters(self._engine.optimizer, self.stage)

    # State ---------------------------------------------------------------------------------------------------------

    def _held(self) -> Iterator[tuple[str, torch.nn.Parameter, Place]]:
        """The trained parameters of which this rank holds elements, in the model's order."""
        for name, parameter in trained(self.module).items():
            if (place := self._places.get(id(parameter))) is not None:
                yield name, parameter, place

    def _masters(self) -> dict[str, torch.Tensor]:
        """This rank's elements of the trained parameters, 1-D."""
        return {name: place.of(place.flat) for name, _, place in self._held()}

    def _shards(self) -> list[Shard]:
        shards = []
        for name, parameter, place in self._held():
            state = self._adamw.state[place.flat]
            moments = {kind: place.of(state[kind]) for kind in MOMENTS}
            average = None if self._average is None else self._average[name]
            values = place.of(place.flat)
            shards.append(Shard(name, _shape(parameter), place.start, values, moments, average))
        return shards

    def _frozen_shards(self) -> list[Shard]:
        shards = []
        parameter: Any
        for name, parameter in frozen(self.module).items():
            if self.stage < 3:
                shards.append(Shard(name, _shape(parameter), 0, parameter.detach().view(-1), replicated=True))
                continue
            partition = parameter.ds_tensor.detach()
            start = partition.numel() * parameter.ds_zero_partition_rank
            length = max(0, min(partition.numel(), parameter.ds_numel - start))
            shards.append(Shard(name, _shape(parameter), start, partition[:length]))
        return shards

    def local_state(self) -> Iterator[FlatRange]:
        return written_ranges(self._shards(), replica=0, replicas=1)

    def scalars(self) -> Scalars:
        average = {} if self._average is None else self._average.scalars()
        return {**self._steps.scalars(), **average, **self._loss_scale.scalars()}

    def load_state(self, source: TensorSource, scalars: Mapping[str, Any], *, frozen: bool = False) -> tuple[str, ...]:
        shapes = {name: _shape(parameter) for name, parameter in trained(self.module).items()}
        check_state(shapes, source)
        steps = StepCounts.of_scalars(scalars, shapes)
        shards = self._shards()
        read_state(shards, source)
        if frozen:
            read_frozen(self.module, self._frozen_shards(), source)
        step_in_parts(self._adamw, steps, {name: place for name, _, place in self._held()})
        self._steps = steps
        self._loss_scale.load(scalars)
        self._announce_loss_scale()
        publish_masters(self._engine.optimizer, self.stage)
        return unused_average(source) if self._average is None else self._average.load(shapes, shards, source, scalars)

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from held(self._engine.optimizer, self.stage, self._adamw, self.module.parameters())
        if self._average is not None:
            yield from (("ema", self._average[name]) for name, _, _ in self._held())

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
