"""FSDP2 (`fully_shard`): parameters, gradients and moments are dim-0 shards, gathered block by block when computing."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from qwen_edit_zero.engines.blocks import repeated_blocks
from qwen_edit_zero.engines.collectives import bound_waiting
from qwen_edit_zero.engines.parameters import replace_parameters
from qwen_edit_zero.engines.torch_engine import TorchEngine
from qwen_edit_zero.errors import SettingsError
from qwen_edit_zero.settings.models import Settings


class FSDP2Engine(TorchEngine):
    """Shards over all ranks, or with `engine.shard_size` over groups of that many, replicated between groups (hybrid).

    Computation and gathering in bf16/fp16, gradient reduction in fp32. FSDP2 cannot shard 0-d parameters: those are
    replicated and their gradients summed here.

    With `engine.cpu_offload` shards, their gradients and moments are in host memory, and AdamW runs there; a block's
    shards are copied to the device for gathering. Replicated parameters stay on the device.
    """

    name = "fsdp2"

    def __init__(self, settings: Settings, device: torch.device) -> None:
        super().__init__(settings, device)
        self._mesh = _make_mesh(device, self.ranks.world_size, settings.engine.shard_size)
        # The model's output is a view of its last layer's. That matters to code that changes it in place, not to us.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
        groups = self._mesh.get_all_groups()
        bound_waiting(groups, settings.engine.timeout_seconds)
        self._shard_group = groups[-1]
        if self._mesh.ndim == 2:
            self._replica, self._replicas = self._mesh.get_local_rank(0), self._mesh.size(0)

    def _wrap(self, module: torch.nn.Module) -> None:
        low_precision = None if self._dtype is torch.float32 else self._dtype
        policy = MixedPrecisionPolicy(param_dtype=low_precision, reduce_dtype=torch.float32)
        offload = CPUOffloadPolicy(pin_memory=self._pins_memory()) if self._offloads() else OffloadPolicy()
        scalars = {parameter for parameter in module.parameters() if parameter.ndim == 0}
        blocks = _shardable_blocks(module)
        for block in blocks:
            fully_shard(
                block,
                mesh=self._mesh,
                reshard_after_forward=self._settings.engine.reshard_after_forward,
                mp_policy=policy,
                offload_policy=offload,
                ignored_params=scalars,
            )
        # The root's own parameters are needed again as soon as backward starts, so they stay gathered.
        fully_shard(
            module,
            mesh=self._mesh,
            reshard_after_forward=False,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=scalars,
        )
        for part in _fsdp_modules(module):
            part.set_gradient_divide_factor(1.0)  # sums, not means
            part.set_force_sum_reduction_for_comms(True)  # gloo knows no pre-multiplied sum
        if self._settings.engine.prefetch_blocks is not None:
            _prefetch(blocks, self._settings.engine.prefetch_blocks)
        replace_parameters(module, self._with_memory)

    def _offloads(self) -> bool:
        return self._settings.engine.cpu_offload

    def _pins_memory(self) -> bool:
        # There is nothing to copy to where the device is the CPU.
        return self._settings.engine.pin_memory and self.device.type != "cpu"

    def _with_memory(self, _: str, parameter: torch.nn.Parameter) -> torch.Tensor:
        if self._offloads() and isinstance(parameter, DTensor):
            # Pinned from the start: FSDP2 would do it in the first forward pass, with the unpinned copy still held.
            return torch.empty_like(parameter, device="cpu", pin_memory=self._pins_memory())
        return torch.empty_like(parameter, device=self.device)

    def _after_values(self, module: torch.nn.Module) -> torch.nn.Module:
        return module

    def _local(self, tensor: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return tensor.to_local() if isinstance(tensor, DTensor) else tensor

    def _start(self, parameter: torch.nn.Parameter) -> int:
        if not isinstance(parameter, DTensor):
            return 0
        rows = parameter.shape[0]
        rows_per_rank = -(-rows // dist.get_world_size(self._shard_group))  # as torch.chunk cuts them
        first = min(rows, rows_per_rank * dist.get_rank(self._shard_group))
        return first * (parameter.numel() // rows if rows else 0)

    def _is_replicated(self, parameter: torch.nn.Parameter) -> bool:
        return not isinstance(parameter, DTensor)

    def _reduce_leftovers(self) -> None:
        scalars = [p for p in self._trained.values() if not isinstance(p, DTensor)]
        if scalars:
            total = torch.stack([torch.zeros_like(p) if p.grad is None else p.grad for p in scalars])
            dist.all_reduce(total)
            for parameter, gradient in zip(scalars, total, strict=True):
                parameter.grad = gradient.clone()

    @contextmanager
    def micro_step(self, *, is_last: bool) -> Iterator[None]:
        assert isinstance(self.module, FSDPModule), "setup comes first"
        # Unreduced gradients are whole: 4 bytes a parameter of the model on every rank, whatever their number.
        self.module.set_requires_gradient_sync(is_last or self._settings.engine.reduce_every_micro_batch)
        self.module.set_is_last_backward(is_last)
        yield

    def _after_eval(self) -> None:
        # Whatever a forward pass leaves gathered, backward would release; here there was none.
        for part in _fsdp_modules(self.module):
            part.reshard()


def _make_mesh(device: torch.device, ranks: int, shard_size: int | None) -> DeviceMesh:
    if shard_size is None or shard_size == ranks:
        return init_device_mesh(device.type, (ranks,), mesh_dim_names=("shard",))
    if shard_size > ranks or ranks % shard_size:
        fitting = [size for size in range(1, ranks + 1) if ranks % size == 0]
        raise SettingsError(
            f"engine.shard_size is {shard_size}, which does not divide the {ranks} ranks of this run into equal "
            f"shard groups. Sizes that do: {', '.join(map(str, fitting))}."
        )
    return init_device_mesh(device.type, (ranks // shard_size, shard_size), mesh_dim_names=("replicate", "shard"))


def _prefetch(blocks: Sequence[torch.nn.Module], count: int) -> None:
    """Have each block start gathering the next `count` ones, in forward and in backward order."""
    sharded: list[FSDPModule] = [block for block in blocks if isinstance(block, FSDPModule)]
    for i, block in enumerate(sharded):
        block.set_modules_to_forward_prefetch(sharded[i + 1 : i + 1 + count])
        block.set_modules_to_backward_prefetch(sharded[max(0, i - count) : i][::-1])


def _fsdp_modules(module: torch.nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]


def _shardable_blocks(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated blocks, but those that share a parameter with something outside: the root shards these."""
    owners: dict[int, int] = {}
    for submodule in module.modules():
        for parameter in submodule._parameters.values():
            if parameter is not None:
                owners[id(parameter)] = owners.get(id(parameter), 0) + 1
    blocks = []
    for block in repeated_blocks(module):
        inside: dict[int, int] = {}
        for submodule in block.modules():
            for parameter in submodule._parameters.values():
                if parameter is not None:
                    inside[id(parameter)] = inside.get(id(parameter), 0) + 1
        if all(count == owners[key] for key, count in inside.items()):
            blocks.append(block)
    return blocks
