"""Training loops to compare with: ours, and what one writes by hand or with accelerate or Lightning Fabric.

All train the same module on the same micro-batches with the same losses, AdamW and clipping, in the same process group.
A loop returns the mean loss over the samples of its step, over all ranks.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import tempfile
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from diffusers import QwenImageTransformer2DModel
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from benchmarks.engines import problem
from qwen_edit_zero.edit_data.batches.batch import EditBatch
from qwen_edit_zero.edit_data.batches.loader import StepBatches
from qwen_edit_zero.edit_data.batches.schedule import StepPlan
from qwen_edit_zero.edit_model.folder import ModelFolder
from qwen_edit_zero.edit_model.transformer import build_transformer
from qwen_edit_zero.settings.models import Settings
from qwen_edit_zero.training.hooks import MetricsHook
from qwen_edit_zero.training.metrics import MetricsWriter, StepMetrics
from qwen_edit_zero.training.progress import Progress
from qwen_edit_zero.training.task import EditTask
from qwen_edit_zero.training.trainer import Trainer

LR, CLIP = 1e-4, 1.0


class Loop(ABC):
    """One way to train. `accumulation` micro-batches of one sample make a step on each rank."""

    def __init__(self, folder: ModelFolder, run: Settings, accumulation: int) -> None:
        self.folder, self.run, self.accumulation = folder, run, accumulation
        self.task = EditTask(folder, run)
        self.ranks = dist.get_world_size()

    @abstractmethod
    def step(self, number: int, batches: Sequence[EditBatch]) -> float:
        """One optimizer step."""

    def close(self) -> None:
        """Release what the loop holds beyond its own attributes."""
        return

    def _adamw(self, module: torch.nn.Module) -> torch.optim.AdamW:
        o = self.run.optimizer
        return torch.optim.AdamW(
            module.parameters(), lr=LR, betas=o.betas, eps=o.eps, weight_decay=o.weight_decay, fused=True
        )

    def _over_ranks(self, loss: torch.Tensor) -> float:
        dist.all_reduce(loss)
        return loss.item() / self.ranks

    def _loss(self, forward: Callable[..., Any], batch: EditBatch) -> torch.Tensor:
        return self.task.losses(forward, batch).mean()


class Ours(Loop):
    """The trainer with its metrics files, under the engine of the settings."""

    def __init__(self, folder: ModelFolder, run: Settings, accumulation: int) -> None:
        super().__init__(folder, run, accumulation)
        self._engine = problem.build(folder, run)
        self._given: list[EditBatch] = []
        self._losses: list[float] = []
        self._files = tempfile.TemporaryDirectory()
        rank = self._engine.dp_rank
        progress = Progress("step", 10**6, rank=rank, stream=io.StringIO())
        writer = MetricsWriter(Path(self._files.name), first_step=0, tensorboard=True) if rank == 0 else None
        self._trainer = Trainer(
            self._engine,
            self.task,
            steps=lambda first, last: iter([(self._plan(first), self._batches())]),
            lr_at=lambda step: LR,
            sample_ids=lambda plan: [],
            max_skipped=0,
            hooks=[MetricsHook(progress, writer), self],
        )

    def after_step(self, metrics: StepMetrics, *, is_last: bool) -> None:
        """Called by the trainer."""
        self._losses.append(metrics.loss)

    def step(self, number: int, batches: Sequence[EditBatch]) -> float:
        """One optimizer step."""
        self._given = list(batches)
        self._trainer.fit(number, number + 1, samples_seen=0)
        return self._losses.pop()

    def close(self) -> None:
        """Release the engine and the metrics files."""
        self._engine.close()
        self._files.cleanup()

    def _plan(self, step: int) -> StepPlan:
        return StepPlan(step=step, epoch=0, indices=tuple(range(self.accumulation * self.ranks)))

    def _batches(self) -> StepBatches:
        return StepBatches(len(self._given), iter(list(self._given)).__next__)


def whole_module(folder: ModelFolder) -> QwenImageTransformer2DModel:
    """The module with its values, in fp32, as a hand-written loop has it before it wraps it."""
    module = build_transformer(folder)
    weights = problem.SeededWeights(module)
    module.load_state_dict({name: weights.whole(name) for name, _ in module.named_parameters()})
    return module


class RawFSDP2(Loop):
    """`fully_shard` on every block and the root."""

    def __init__(self, folder: ModelFolder, run: Settings, accumulation: int) -> None:
        super().__init__(folder, run, accumulation)
        self._module = whole_module(folder)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in self._module.transformer_blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(self._module, mp_policy=policy)
        self._optimizer = self._adamw(self._module)

    def step(self, number: int, batches: Sequence[EditBatch]) -> float:
        """One optimizer step."""
        total = torch.zeros(())
        for batch in batches:
            loss = self._loss(self._module, batch) / self.accumulation
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self._module.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return self._over_ranks(total)


def plain_deepspeed_config(config: dict[str, Any], ranks: int, accumulation: int) -> dict[str, Any]:
    """A JSON for `deepspeed.initialize`: bf16, batches of `accumulation` micro-batches of one sample."""
    return {
        **{key: value for key, value in config.items() if key != "optimizer"},
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "train_batch_size": ranks * accumulation,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": None,
    }


def quiet_deepspeed() -> Any:
    """The library, kept from compiling an extension on CPUs at its start and from warning at every collective."""
    import deepspeed
    from deepspeed import comm

    warnings.filterwarnings("ignore", category=FutureWarning)
    if not comm.is_initialized():
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        comm.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
    return deepspeed


def in_bf16(model: Callable[..., Any]) -> Callable[..., Any]:
    """Call `model` with floating inputs in bf16, which DeepSpeed's engine expects of its caller."""

    def call(**inputs: Any) -> Any:
        def cast(value: Any) -> Any:
            return value.bfloat16() if isinstance(value, torch.Tensor) and value.is_floating_point() else value

        return model(**{name: cast(value) for name, value in inputs.items()})

    return call


class RawDeepSpeed(Loop):
    """`deepspeed.initialize` with the settings' JSON, or with another one."""

    def __init__(
        self, folder: ModelFolder, run: Settings, accumulation: int, config: dict[str, Any] | None = None
    ) -> None:
        super().__init__(folder, run, accumulation)
        module = whole_module(folder)
        config = config or run.engine.deepspeed
        assert config is not None
        self._engine, *_ = quiet_deepspeed().initialize(
            model=module,
            optimizer=self._adamw(module),
            config=plain_deepspeed_config(config, self.ranks, accumulation),
            dist_init_required=False,
        )

    def step(self, number: int, batches: Sequence[EditBatch]) -> float:
        """One optimizer step."""
        total = torch.zeros(())
        for batch in batches:
            loss = self._loss(in_bf16(self._engine), batch)
            self._engine.backward(loss)  # divides by the accumulation
            self._engine.step()
            total += loss.detach() / self.accumulation
        return self._over_ranks(total)

    def close(self) -> None:
        """Release the engine."""
        self._engine.destroy()


class Accelerate(Loop):
    """Hugging Face accelerate on FSDP2 or DeepSpeed."""

    def __init__(self, folder: ModelFolder, run: Settings, accumulation: int) -> None:
        super().__init__(folder, run, accumulation)
        from accelerate import Accelerator
        from accelerate.state import AcceleratorState, GradientState, PartialState
        from accelerate.utils import (
            DeepSpeedPlugin,
            DistributedType,
            FullyShardedDataParallelPlugin,
        )

        for state in (AcceleratorState, GradientState, PartialState):
            state._shared_state.clear()  # one engine a process, it thinks
        options: dict[str, Any]
        if run.engine.backend == "deepspeed":
            quiet_deepspeed()
            assert run.engine.deepspeed is not None
            config = plain_deepspeed_config(run.engine.deepspeed, self.ranks, accumulation)
            options = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config=config)}
        else:
            os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
            # It shards on accelerators only; told that the CPU is one, it does so on gloo as well.
            PartialState().distributed_type = DistributedType.MULTI_GPU
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2,
                auto_wrap_policy="transformer_based_wrap",
                transformer_cls_names_to_wrap=["QwenImageTransformerBlock"],
                mixed_precision_policy=policy,
                reshard_after_forward=True,
            )
            options = {"fsdp_plugin": plugin}
        self._accelerator = Accelerator(
            mixed_precision="bf16",
            gradient_accumulation_steps=accumulation if run.engine.backend == "deepspeed" else 1,
            **options,
        )
        module = whole_module(folder)
        self._model, self._optimizer = self._accelerator.prepare(module, self._adamw(module))
        self._is_deepspeed = run.engine.backend == "deepspeed"

    def step(self, number: int, batches: Sequence[EditBatch]) -> float:
        """One optimizer step."""
        return self._step_deepspeed(batches) if self._is_deepspeed else self._step_fsdp2(batches)

    def _step_fsdp2(self, batches: Sequence[EditBatch]) -> float:
        # Without `accumulate`, which would keep whole gradients and reduce them once: the others keep shards only.
        total = torch.zeros(())
        for batch in batches:
            loss = self._loss(self._model, batch) / self.accumulation
            self._accelerator.backward(loss)
            total += loss.detach()
        self._accelerator.clip_grad_norm_(self._model.parameters(), CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return self._over_ranks(total)

    def _step_deepspeed(self, batches: Sequence[EditBatch]) -> float:
        total = torch.zeros(())
        for batch in batches:
            with self._accelerator.accumulate(self._model):
                loss = self._loss(in_bf16(self._model), batch)
                self._accelerator.backward(loss)  # divides by the accumulation, clips and steps at the end
                self._optimizer.step()
                self._optimizer.zero_grad()
            total += loss.detach() / self.accumulation
        return self._over_ranks(total)


class Fabric(Loop):
    """Lightning Fabric on FSDP2 (its DeepSpeed strategy refuses CPUs)."""

    def __init__(self, folder: ModelFolder, run: Settings, accumulation: int) -> None:
        super().__init__(folder, run, accumulation)
        fabric = importlib.import_module("lightning_fabric")
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

        def parallelize(module: Any, mesh: Any) -> Any:
            for block in module.transformer_blocks:
                fully_shard(block, mesh=mesh["data_parallel"], mp_policy=policy)
            return fully_shard(module, mesh=mesh["data_parallel"], mp_policy=policy)

        strategy = fabric.strategies.ModelParallelStrategy(
            parallelize, data_parallel_size=self.ranks, tensor_parallel_size=1
        )
        with contextlib.redirect_stderr(io.StringIO()):
            self._fabric = fabric.Fabric(accelerator="cpu", devices=self.ranks, strategy=strategy)
            self._fabric.launch()
        module = whole_module(folder)
        self._model = self._fabric.setup_module(module)
        self._optimizer = self._fabric.setup_optimizers(self._adamw(self._model))

    def step(self, number: int, batches: Sequence[EditBatch]) -> float:
        """One optimizer step."""
        total = torch.zeros(())
        for batch in batches:
            loss = self._loss(self._model, batch) / self.accumulation
            self._fabric.backward(loss)
            total += loss.detach()
        self._fabric.clip_gradients(self._model, self._optimizer, max_norm=CLIP)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return self._over_ranks(total)
