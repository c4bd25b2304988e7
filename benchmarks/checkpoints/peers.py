"""What checkpoints are compared with: torch DCP under raw FSDP2, and DeepSpeed's own under raw ZeRO.

The loops are those of the engine benchmarks. Here they also save, load, and show what they hold as flat ranges.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from benchmarks.engines.peers import RawDeepSpeed, RawFSDP2
from qwen_edit_zero.edit_model.folder import ModelFolder
from qwen_edit_zero.engines.shards import MOMENTS
from qwen_edit_zero.engines.zero.masters import flat_masters, places, publish_masters
from qwen_edit_zero.flat_state import PARAM, FlatRange
from qwen_edit_zero.settings.models import Settings


class Dcp(RawFSDP2):
    """`get_state_dict` with `save`, `async_save` and `load`, as torch's documentation shows them."""

    def __init__(self, folder: ModelFolder, run: Settings) -> None:
        super().__init__(folder, run, 1)
        self._group = dist.new_group(backend="gloo")  # a thread of its own may not share the one that trains
        for parameter in self._module.parameters():  # moments of all: else those without gradients are not saved
            parameter.grad = torch.zeros_like(parameter)
        self._optimizer.step()
        self._optimizer.zero_grad()

    def save(self, path: Path) -> None:
        """Write `path`; every rank its file, synced."""
        save(self._state(), checkpoint_id=path)
        sync_files(path)

    def begin_save(self, path: Path) -> Future[Any]:
        """Copy the state; a thread writes it."""
        started = async_save(self._state(), checkpoint_id=path, process_group=self._group)
        assert isinstance(started, Future)
        return started

    def load(self, path: Path) -> None:
        """Fill model and optimizer."""
        state = self._state()
        load(state, checkpoint_id=path)
        set_state_dict(
            self._module, self._optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )

    def ranges(self) -> Iterator[FlatRange]:
        """What this rank holds."""
        for name, parameter in self._module.named_parameters():
            assert isinstance(parameter, DTensor)
            shape = tuple(parameter.shape)
            _, offset = compute_local_shape_and_global_offset(shape, parameter.device_mesh, parameter.placements)
            start = offset[0] * parameter[0].numel() if shape else 0
            state = self._optimizer.state[parameter]
            for kind, tensor in ((PARAM, parameter), *((kind, state[kind]) for kind in MOMENTS)):
                if local := _local(tensor):
                    yield FlatRange(name, kind, shape, start, local[0])

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._module, self._optimizer)
        return {"model": model, "optimizer": optimizer}


def _local(tensor: DTensor) -> list[torch.Tensor]:
    with torch.no_grad():
        local = tensor.to_local()
    return [local.detach().view(-1)] if local.numel() else []


class DeepSpeed(RawDeepSpeed):
    """`save_checkpoint` and `load_checkpoint`, also of a universal checkpoint."""

    def __init__(self, folder: ModelFolder, run: Settings, stage: int) -> None:
        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        super().__init__(folder, run, 1)
        self._stage = stage

    def save(self, path: Path) -> None:
        """Write `path`, whose name is the tag. DeepSpeed syncs nothing: the ranks do it for it."""
        self._engine.save_checkpoint(str(path.parent), tag=path.name)
        sync_files(path)

    def load(self, path: Path, *, universal: bool = False) -> None:
        """Fill model and optimizer."""
        self._engine._config.load_universal_checkpoint = universal
        with contextlib.redirect_stdout(io.StringIO()):
            found, _ = self._engine.load_checkpoint(str(path.parent), tag=path.name)
        assert found is not None, f"DeepSpeed loaded nothing from {path}"

    def ranges(self) -> Iterator[FlatRange]:
        """What this rank holds."""
        return deepspeed_ranges(self._engine, self._stage)


def deepspeed_ranges(engine: Any, stage: int) -> Iterator[FlatRange]:
    """Masters and moments of this rank."""
    optimizer = engine.optimizer
    where = places(optimizer, stage, engine.module.parameters(), dist.get_rank())
    for name, parameter in engine.module.named_parameters():
        if place := where.get(id(parameter)):
            state = optimizer.optimizer.state[place.flat]
            for kind, flat in ((PARAM, place.flat), *((kind, state[kind]) for kind in MOMENTS)):
                shape = tuple(getattr(parameter, "ds_shape", parameter.shape))
                yield FlatRange(name, kind, shape, place.start, place.of(flat))


def computing_weights(engine: Any, stage: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of what this rank computes with (bf16) and the masters (fp32) of the same elements."""
    where = places(engine.optimizer, stage, engine.module.parameters(), dist.get_rank())
    for parameter in engine.module.parameters():
        if place := where.get(id(parameter)):
            whole = parameter.detach().view(-1)[place.start :] if stage < 3 else parameter.ds_tensor.detach().view(-1)
            yield whole[: place.length], place.of(place.flat)


def publish(engine: Any, stage: int) -> None:
    """Round masters that were changed to the weights that compute. Collective."""
    publish_masters(engine.optimizer, stage)
    assert flat_masters(engine.optimizer, stage)


def sync_files(path: Path) -> None:
    """Sync a folder's files, dealt out to the ranks, and the folder. Returns when all are done."""
    dist.barrier()
    files = sorted(p for p in path.rglob("*") if p.is_file())
    for entry in [*files[dist.get_rank() :: dist.get_world_size()], path]:
        descriptor = os.open(entry, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    dist.barrier()


def folder_bytes(path: Path) -> int:
    """Bytes of all files in a folder."""
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())
