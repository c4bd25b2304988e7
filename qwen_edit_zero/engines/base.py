"""The interface through which training sees a parallel engine.

    for i, batch in enumerate(micro_batches):
        with engine.micro_step(is_last=i == n - 1):
            engine.backward(loss_sum(engine.forward, batch) / samples_in_global_batch)
    result = engine.step(lr=lr_at(step))

Gradients are *summed* over micro-batches and ranks; dividing by the samples of the global batch is the trainer's
business, once. So nothing depends on how the batch is split. Ranks of a sequence group have the same micro-batches and
losses, which count once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from qwen_edit_zero.engines.ranks import Ranks
from qwen_edit_zero.flat_state import FlatRange, TensorSource
from qwen_edit_zero.settings.models import OptimizerSettings

Scalars = dict[str, Any]  # JSON values


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did, the same on every rank.

    Attributes:
        grad_norm: global L2 norm over all trained parameters, before clipping, of the unscaled gradient; infinite or
            NaN if the step was not applied because of it.
        applied: False if weights, moments and counters were left untouched: the gradient was not finite, or the step
            was vetoed.
        loss_scale: the fp16 loss scale used in this step; 1.0 in other precisions.
        non_finite: names of trained parameters whose gradient is not finite, the first few in the model's order, the
            same on every rank; empty if the step was applied.
        vetoed: `ParallelEngine.veto` would not have it.
    """

    grad_norm: float
    applied: bool
    loss_scale: float = 1.0
    non_finite: tuple[str, ...] = ()
    vetoed: bool = False


class ParallelEngine(ABC):
    """One rank's view of a model trained by all ranks. See the module docstring for the call order."""

    name: str
    module: torch.nn.Module  # unwrapped, with clean parameter names
    device: torch.device
    ranks: Ranks
    # Asked in `step` for a finite gradient, given its norm as in StepResult; True: leave the step out. It must answer
    # the same on every rank. Only set it where it is needed: the norm is then waited for before the update.
    veto: Callable[[float], bool] | None = None

    @property
    def dp_rank(self) -> int:
        """Which share of the samples this rank computes."""
        return self.ranks.dp_rank

    @property
    def dp_size(self) -> int:
        """Number of shares of the samples: ranks, or groups of ranks that split sequences."""
        return self.ranks.dp_size

    @abstractmethod
    def init_context(self) -> AbstractContextManager[Any]:
        """Context in which the module is constructed: parameters take no memory and have no values.

        Tensors that are not parameters must be given real values before `setup`.
        """

    @abstractmethod
    def setup(self, module: torch.nn.Module, *, optimizer: OptimizerSettings, weights: TensorSource | None) -> None:
        """Checkpoint activations, wrap, materialise, stream the weights in, build the optimizer.

        Parameters whose `requires_grad` is False are frozen: sharded like the others, kept in the compute precision,
        never updated. Parameters with values that are not in `weights` (or all, if it is None) keep these values;
        those of all ranks must be equal. A trained parameter that never gets a gradient counts as having a zero
        gradient: its moments and its weight decay go on, under every engine.
        Raises ModelFolderError if a parameter without values is missing from `weights`, or if shapes differ.
        """

    @abstractmethod
    def forward(self, **inputs: Any) -> Any:
        """Call the wrapped module. Floating inputs are cast to the compute precision as the engine needs."""

    @abstractmethod
    def micro_step(self, *, is_last: bool) -> AbstractContextManager[None]:
        """Holds forward *and* backward of one micro-batch. Gradients are reduced over ranks in the last one."""

    @abstractmethod
    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate gradients of `loss`; neither averages over ranks or micro-batches, nor steps.

        In a sequence group every rank gives the whole loss, and propagates its equal share of it.
        """

    @abstractmethod
    def step(self, *, lr: float) -> StepResult:
        """Clip by the global norm, update, zero the gradients. The same result on every rank."""

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[None]:
        """No gradients, `module.eval()`; training mode and sharding restored afterwards."""

    @abstractmethod
    def averaged(self) -> AbstractContextManager[None]:
        """Inside, the module computes with the running average of its weights; every bit is back afterwards.

        Collective, between steps; only if `optimizer.ema` is on.
        """

    @abstractmethod
    def local_state(self) -> Iterator[FlatRange]:
        """Trained parameters in fp32, every optimizer moment and the running average, as ranges this rank is to write.

        Over all ranks the ranges cover every element exactly once (replicas are split between their holders).
        """

    @abstractmethod
    def scalars(self) -> Scalars:
        """Engine state that is no tensor and equal on all ranks.

        `optimizer_steps` and, of parameters whose count differs, `parameter_steps` by name; `ema_updates`; loss
        scaling counters.
        """

    @abstractmethod
    def load_state(self, source: TensorSource, scalars: Mapping[str, Any], *, frozen: bool = False) -> tuple[str, ...]:
        """Replace parameters, moments, averages and scalars by those of `source`, whichever engine wrote it.

        Frozen parameters stay, unless `frozen`: then `source` must have them, as tensors of the kind `frozen`, and no
        forward pass has been made.
        Reads only the ranges this rank needs. Returns what a user should know: whether the average of the weights
        begins anew or ends. Raises CheckpointError naming the tensor if one is missing or differs
        in shape, or if it holds trained parameters that this run does not train.
        """

    def held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What this rank holds of the model now, for reports: (kind, tensor).

        A kind is parameters, gathered, masters, gradients, moments or ema. Tensors may share memory; buffers of
        libraries are not among them.
        """
        return iter(())

    @abstractmethod
    def full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter, whole, in fp32 on CPU, one at a time. Collective: all ranks must iterate in step."""

    @abstractmethod
    def close(self) -> None:
        """Release what the engine holds. Idempotent."""
