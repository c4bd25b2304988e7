"""Made-up training state, cut into ranges in odd ways."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from qwen_edit_zero.checkpoints.manifest import ModelReference
from qwen_edit_zero.checkpoints.reader import CheckpointReader
from qwen_edit_zero.checkpoints.writer import save_checkpoint
from qwen_edit_zero.flat_state import FlatRange

MODEL = ModelReference(path="tiny", fingerprint="f" * 8, config={"num_layers": 1}, frozen=("frozen.weight",))
State = dict[tuple[str, str], torch.Tensor]


def made_up_state(seed: int = 0) -> State:
    """Every shape and value that is easily lost: 0-d, no elements, NaN payloads, infinities, odd sizes, integers."""
    g = torch.Generator().manual_seed(seed)
    state: State = {}
    for kind in ("param", "exp_avg", "exp_avg_sq"):
        state["block.weight", kind] = torch.randn(37, 53, generator=g)
        state["block.bias", kind] = torch.randn(7, generator=g)
        state["scale", kind] = torch.randn((), generator=g)
        state["none", kind] = torch.empty(0, 5)
        state['名前 "quoted".weight', kind] = torch.randn(3, 1, 5, generator=g)
    odd = torch.tensor([0x7FC00001, 0x7F800001, -0x3FFFFF, -(2**31), 0x7F800000, 1], dtype=torch.int32)
    state["odd", "param"] = odd.view(torch.float32)
    state["half", "param"] = torch.randn(11, generator=g).bfloat16()
    state["steps", "step"] = torch.tensor(2**40 + seed)
    return state


def owned_ranges(state: State, rank: int, world: int, seed: int) -> Iterator[FlatRange]:
    """This rank's ranges of a random cut of every tensor, the same cut on all ranks; empty ones among them."""
    cut = random.Random(seed)
    for (name, kind), tensor in state.items():
        flat = tensor.reshape(-1)
        bounds = sorted(cut.choices(range(flat.numel() + 1), k=2 * world))
        for start, end in zip([0, *bounds], [*bounds, flat.numel()], strict=True):
            if cut.randrange(world) == rank:
                yield FlatRange(name, kind, tuple(tensor.shape), start, flat[start:end])
        if flat.numel() == 0 and rank == world - 1:
            yield FlatRange(name, kind, tuple(tensor.shape), 0, flat)


def save(folder: Path, step: int, *, rank: int = 0, world: int = 1, seed: int = 0, **more: Any) -> Path:
    """Save `made_up_state(step)` as it is owned by `world` ranks."""
    state = made_up_state(step)
    arguments: dict[str, Any] = {
        "ranges": lambda: owned_ranges(state, rank, world, seed),
        "run_state": {"step": step, "samples_seen": 8 * step, "lr": 1e-5, "名": [1, None, True]},
        "settings": {"run": {"name": "demo"}},
        "model": MODEL,
        "engine": "ddp",
    }
    return save_checkpoint(folder, step=step, **(arguments | more))


def differing_bytes(path: Path, state: State, seed: int = 0, world: int = 2) -> int:
    """Bytes of the checkpoint that are not those of `state`, read in yet another cut by `world` ranks."""
    wrong = 0
    with CheckpointReader(path) as reader:
        assert {(t.name, t.kind) for t in reader.manifest.tensors} == set(state)
        for rank in range(world):
            for item in owned_ranges(state, rank, world, seed + 1):
                read = reader.read(item.name, item.start, item.values.numel(), item.kind)
                assert read.dtype == item.values.dtype
                assert reader.shape(item.name, item.kind) == item.shape
                wrong += int((read.view(torch.uint8) != item.values.contiguous().view(torch.uint8)).sum())
    return wrong
